"""Families by `model_type`, and a backbone's metadata, read without its weights."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from megatron_mux.backbone import config, resolve
from megatron_mux.backbone.config import Family
from megatron_mux.backbone.model_directory import open_checkpoint, read_config, tokenizer_directory
from megatron_mux.errors import UserError
from megatron_mux.files import read_json
from megatron_mux.hub_cache import find_model
from megatron_mux.quantised.config import read_quantisation
from megatron_mux.quantised.scheme import QuantMethod, agree
from megatron_mux.shape import BackboneShape

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "gemma3_text",
    "gpt2",
    "gpt_neo",
    "llama",
    "mistral",
    "mixtral",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "starcoder2",
)
"""Each is a module of `families` with a `FAMILY`."""

WITH_EXPERTS = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe")
"""Those with mixture-of-experts layers."""

DENSE = tuple(name for name in FAMILIES if name not in WITH_EXPERTS)


def family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        UserError: It is not known.
    """
    if model_type not in FAMILIES:
        raise UserError(
            f"The backbone's config.json has model_type = {json.dumps(model_type)}: "
            f"supported are {', '.join(FAMILIES)}."
        )
    found: Family = importlib.import_module(f"megatron_mux.backbone.families.{model_type}").FAMILY
    return found


@dataclass(frozen=True)
class BackboneInfo:
    """A backbone's metadata: enough to validate tasks against.

    Attributes:
        fingerprint: SHA-256 of the shape (with how weights are quantised), and of dtypes, shapes and samples of the
            tensors, whatever files hold them.
        stored: Full Hugging Face name of each tensor to its name in the checkpoint.
    """

    path: Path
    shape: BackboneShape
    fingerprint: str
    stored: dict[str, str]

    @property
    def tokenizer(self) -> Path:
        """Directory of its tokenizer.

        Raises:
            UserError: A Megatron checkpoint has none.
        """
        return tokenizer_directory(self.path)

    def check_parallel(
        self,
        tensor_parallel: int,
        pipeline_parallel: int,
        expert_parallel: int = 1,
        expert_tensor_parallel: int = 1,
    ) -> None:
        """Raise `UserError` where the backbone cannot be divided so."""
        problems = self.shape.parallel_problems(
            tensor_parallel, pipeline_parallel, expert_parallel, expert_tensor_parallel
        )
        if problems:
            raise UserError(
                *(f"The backbone {self.path} cannot be divided: {problem}." for problem in problems)
            )


def read_shape(path: str | Path, quantise: QuantMethod | None = None) -> BackboneShape:
    """The shape alone, from config.json.

    Args:
        path: A backbone's directory, a config.json by itself, whatever it is called, or the name of a model in the
            Hugging Face cache.
        quantise: How to quantise weights on load, if the checkpoint does not store them so.

    Raises:
        UserError: The config is missing, of an unknown family, or asks for something unsupported.
    """
    path = find_model(path)
    return shape_of(read_json(path) if path.is_file() else read_config(path), path, quantise)


def stored_dtype(path: str | Path) -> str | None:
    """The dtype of a backbone's weights, as its config names it; None if it does not.

    Raises:
        UserError: The config is missing or unreadable.
    """
    raw = read_config(find_model(path))
    found = raw.get("dtype") or raw.get("torch_dtype")  # the latter before transformers 5
    return found.removeprefix("torch.") if isinstance(found, str) else None


def read_backbone_info(path: str | Path, quantise: QuantMethod | None = None) -> BackboneInfo:
    """Read the config and the headers of the weights: milliseconds, whatever the size.

    (Seconds for a checkpoint that stores an output layer though its config ties it: the two are compared.)

    Args:
        quantise: See `read_shape`.

    Raises:
        UserError: As `read_shape`; or tensors are missing, unreadable, superfluous, or contradict the config.
    """
    path = find_model(path)
    shape = shape_of(read_config(path), path, quantise)
    with open_checkpoint(path, shape) as checkpoint:
        stored = resolve.resolve(shape, checkpoint)
        # Config and files may be written anew, with other words and other shards: they are the same backbone.
        about = _plain(replace(shape, config={})), checkpoint.digest(stored)
    return BackboneInfo(path, shape, hashlib.sha256(json.dumps(about).encode()).hexdigest(), stored)


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, without what has its default: fields that come with later versions change nothing."""
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((each, getattr(value, each.name)) for each in fields(value))
        return {each.name: _plain(its) for each, its in pairs if each.name != "names" and its != each.default}
    if isinstance(value, Mapping):
        return {str(key): _plain(its) for key, its in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (tuple, list, frozenset)) else value


def info_without_weights(path: str | Path, quantise: QuantMethod | None = None) -> BackboneInfo:
    """Metadata from config.json alone, as if all weights were there; the fingerprint is empty.

    Args:
        quantise: See `read_shape`.

    Raises:
        UserError: As `read_shape`.
    """
    path = find_model(path)
    shape = shape_of(read_config(path), path, quantise)
    return BackboneInfo(path, shape, "", {name: name for name in resolve.expected(shape)})


def shape_of(raw: Mapping[str, Any], path: Path, quantise: QuantMethod | None = None) -> BackboneShape:
    """The shape that a config describes.

    Args:
        path: Its file, or the backbone's directory, for messages.
        quantise: See `read_shape`.

    Raises:
        UserError: It is of an unknown family, or asks for something unsupported.
    """
    place = path if path.is_file() else path / "config.json"
    found = family(raw.get("model_type", ""))
    quantisation = agree(read_quantisation(raw), quantise, str(place))
    return replace(found.shape(config.complete(found, raw, place)), quantisation=quantisation)
