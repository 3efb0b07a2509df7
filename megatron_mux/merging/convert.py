"""Converts a Hugging Face directory into a Megatron checkpoint (`torch_dist`), and the other way round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mux.backbone.model_directory import open_checkpoint, read_config
from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info, shape_of
from megatron_mux.backbone.torch_dist.arguments import differences, to_arguments, to_config
from megatron_mux.backbone.torch_dist.locate import is_megatron
from megatron_mux.backbone.torch_dist.write import write_torch_dist
from megatron_mux.errors import UserError
from megatron_mux.files import new_directory
from megatron_mux.merging.backbone_source import BackboneSource
from megatron_mux.merging.hf_directory import Progress, copy_companions, write_json, write_shards


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        to: The format.
        tensors: How many there are.
        size: Bytes of them.
        seconds: Taken.
    """

    to: str
    tensors: int
    size: int
    seconds: float


def convert(
    source: Path, output: Path, tokenizer: Path | None, largest: int, progress: Progress
) -> Converted:
    """Convert a model; values are not changed.

    Args:
        source: A Hugging Face directory, or a Megatron checkpoint.
        output: Directory to make.
        tokenizer: Directory of the tokenizer to copy; None: the one of `source`.
        largest: Most bytes of a safetensors file.
        progress: Told of every tensor.

    Raises:
        UserError: The model cannot be read or written in the other format, or the output exists.
    """
    began = time.monotonic()
    info = read_backbone_info(source)
    companions = tokenizer or info.tokenizer
    done = 0
    with open_checkpoint(source, info.shape) as checkpoint, new_directory("--output", output) as directory:
        tensors = BackboneSource(info, checkpoint)
        total = sum(each.nbytes for each in tensors.tensors.values())

        def parts(name: str) -> Iterator[Tensor]:
            nonlocal done
            for part in tensors.parts(name):
                done += part.nbytes
                yield part
            progress(done, total, name)

        def whole(name: str) -> Tensor:
            nonlocal done
            value = tensors.read(name)
            done += value.nbytes
            progress(done, total, name)
            return value

        config = read_config(source)
        if is_megatron(source):
            to, count = "Hugging Face", len(tensors.tensors)
            write_shards(directory, tensors.tensors, parts, largest)
            config = _with_special_tokens(config, companions)
        else:
            to, arguments = "torch_dist", _arguments(info, config.get("dtype") or "float32", output)
            count = write_torch_dist(directory, info.shape, arguments, tensors.tensors, whole)
        # Beside a Megatron checkpoint too: it says what Megatron's arguments have no place for.
        write_json(directory / "config.json", config)
        copy_companions(companions, directory)
    return Converted(to, count, total, time.monotonic() - began)


def _arguments(info: BackboneInfo, dtype: str, output: Path) -> dict[str, Any]:
    """Megatron's command line for a model, or a refusal if Megatron would compute something else."""
    shape = info.shape
    shape.refuse("A Megatron checkpoint", "latent", "quantisation")
    arguments = to_arguments(shape, dtype) | {"tokenizer_model": str(output.absolute())}
    try:
        described = shape_of(to_config(arguments, shape.vocab, dtype), info.path)
        found = differences(shape, described)
    except UserError as error:
        raise UserError(
            *(f"{info.path}: Megatron's GPT cannot compute this {shape.family}: {p}" for p in error.problems)
        ) from None
    if found:
        raise UserError(
            f"{info.path}: Megatron's GPT cannot compute this {shape.family} ({', '.join(found)}): convert it with "
            "Megatron Bridge"
        )
    return arguments


def _with_special_tokens(config: dict[str, Any], tokenizer: Path) -> dict[str, Any]:
    """The config with the ids of the tokens that begin and end texts, which Megatron does not keep."""
    from transformers import AutoTokenizer

    if config.get("eos_token_id") is not None:
        return config
    found = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True, trust_remote_code=False)
    return {**config, "bos_token_id": found.bos_token_id, "eos_token_id": found.eos_token_id}
