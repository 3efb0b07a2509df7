"""What a backbone's directory may be: a Hugging Face model, or a checkpoint of Megatron's (`torch_dist`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_mux.backbone.checkpoint import Checkpoint
from megatron_mux.backbone.torch_dist.arguments import to_config
from megatron_mux.backbone.torch_dist.checkpoint import TorchDistCheckpoint
from megatron_mux.backbone.torch_dist.locate import is_megatron, locate
from megatron_mux.backbone.torch_dist.storage import DTYPES, read_contents
from megatron_mux.errors import UserError
from megatron_mux.files import read_json
from megatron_mux.shape import BackboneShape

_CONFIG = "config.json"
_EMBEDDING = "embedding.word_embeddings.weight"
_DTYPE_NAMES = {name: str(dtype).removeprefix("torch.") for dtype, name in DTYPES.items()}
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


def read_config(path: Path) -> dict[str, Any]:
    """The Hugging Face config of a backbone.

    Args:
        path: Its directory. Beside a Megatron checkpoint config.json wins over the command line that it keeps.

    Raises:
        UserError: There is none, or Megatron's command line asks for something unsupported.
    """
    if not path.is_dir():
        raise UserError(f"The backbone {path} is not a directory.")
    if is_megatron(path):
        places = _with_parent(path, locate(path))
        config = next((place / _CONFIG for place in places if (place / _CONFIG).is_file()), None)
        return read_json(config) if config is not None else _from_arguments(places[0])
    if not (path / _CONFIG).is_file():
        _refuse_adapter(path)
        raise UserError(
            f"The backbone {path} holds no config.json: give the directory of a Hugging Face model, or of a Megatron "
            "checkpoint."
        )
    return read_json(path / _CONFIG)


def _refuse_adapter(path: Path) -> None:
    """Refuse the directory of an adapter where a model is asked for."""
    config = path / "adapter_config.json"
    if config.is_file():
        base = read_json(config).get("base_model_name_or_path")
        raise UserError(f"The backbone {path} is a PEFT adapter: give the model that it is for ({base}).")


def _from_arguments(iteration: Path) -> dict[str, Any]:
    contents = read_contents(iteration)
    embedding = contents.tensors.get(_EMBEDDING)
    if embedding is None:
        raise UserError(f"{iteration} lacks {_EMBEDDING}: it is not a GPT of Megatron-Core.")
    if contents.arguments is None:
        raise UserError(
            f"{iteration} does not keep Megatron's command line: put the model's Hugging Face config.json beside it."
        )
    dtype = _DTYPE_NAMES.get(embedding.dtype, embedding.dtype)
    try:
        return to_config(contents.arguments, embedding.shape[0], dtype)
    except UserError as error:
        raise UserError(*(f"{iteration}: {problem}" for problem in error.problems)) from None


def _with_parent(path: Path, iteration: Path) -> list[Path]:
    """Where files may lie beside a checkpoint: with an iteration, or with all of them."""
    return [iteration, *([path] if path != iteration else [iteration.absolute().parent])]


def open_checkpoint(path: Path, shape: BackboneShape) -> Checkpoint:
    """The tensors of a backbone by their Hugging Face names.

    Raises:
        UserError: See `Checkpoint` and `TorchDistCheckpoint`.
    """
    return TorchDistCheckpoint(path, shape) if is_megatron(path) else Checkpoint(path)


def tokenizer_directory(path: Path) -> Path:
    """Where a backbone's tokenizer is.

    Args:
        path: The backbone's directory. A Megatron checkpoint may have the tokenizer beside it, or name its directory.

    Raises:
        UserError: A Megatron checkpoint has none.
    """
    if not is_megatron(path):
        return path
    iteration = locate(path)
    arguments = read_contents(iteration).arguments or {}
    named = arguments.get("tokenizer_model")
    for place in (*_with_parent(path, iteration), *([Path(named)] if isinstance(named, str) else [])):
        if any((place / name).is_file() for name in _TOKENIZER):
            return place
    raise UserError(
        f"{path}: a Megatron checkpoint without a tokenizer: give --tokenizer-model DIR (a Hugging Face directory), or "
        f"put tokenizer.json and tokenizer_config.json into {path}"
    )
