"""Families by `model_type`, and what can be known of a backbone before its weights are read."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

from megatron_mux.backbone import config, weights
from megatron_mux.backbone.checkpoint import Checkpoint, refuse_megatron
from megatron_mux.backbone.family import Family
from megatron_mux.backbone.shape import BASE_OPS, BackboneShape
from megatron_mux.errors import UserError
from megatron_mux.files import read_json
from megatron_mux.layout import BaseOpName

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neo", "opt")
"""Each is a module of `families` with a `FAMILY`."""


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
    """A backbone without its weights: enough to validate tasks against.

    Attributes:
        path: Its directory.
        shape: Its sizes.
        module_paths: Full Hugging Face names of all modules that lie within BaseOps.
        layer_modules: For each BaseOp, the paths within a layer of its modules.
        fingerprint: SHA-256 of config.json, of the safetensors headers and of samples of their data.
        family: Where its tensors are.
        stored: Full Hugging Face name of each tensor to its name in the checkpoint.
    """

    path: Path
    shape: BackboneShape
    module_paths: tuple[str, ...]
    layer_modules: dict[BaseOpName, tuple[str, ...]]
    fingerprint: str
    family: Family
    stored: dict[str, str]

    def check_parallel(self, tensor_parallel: int, pipeline_parallel: int) -> None:
        """Raise `UserError` where the backbone cannot be divided so."""
        problems = self.shape.parallel_problems(tensor_parallel, pipeline_parallel)
        if problems:
            raise UserError(
                *(f"The backbone {self.path} cannot be divided: {problem}." for problem in problems)
            )


def read_shape(path: str | Path) -> BackboneShape:
    """The shape alone, from config.json.

    Args:
        path: A backbone's directory, or a config.json by itself, whatever it is called.

    Raises:
        UserError: The config is not there, of an unknown family, or asks for what is not done.
    """
    path = Path(path)
    return (_read_file(path) if path.is_file() else _read_config(path))[1]


def read_backbone_info(path: str | Path) -> BackboneInfo:
    """Read config.json and the headers of the safetensors: milliseconds, whatever the size.

    (Seconds for a checkpoint that stores an output layer though its config ties it: the two are compared.)

    Raises:
        UserError: As `read_shape`; or tensors are missing, unreadable, superfluous, or contradict the config.
    """
    path = Path(path)
    found, shape = _read_config(path)
    with Checkpoint(path) as checkpoint:
        stored = weights.resolve(shape, found.names, checkpoint)
        digest = hashlib.sha256((path / "config.json").read_bytes())
        digest.update(checkpoint.digest.encode())
    return _info(path, found, shape, stored, digest.hexdigest())


def info_without_weights(path: str | Path) -> BackboneInfo:
    """What config.json alone tells, as if the weights were there; the fingerprint is no backbone's.

    Raises:
        UserError: As `read_shape`.
    """
    path = Path(path)
    found, shape = _read_config(path)
    return _info(path, found, shape, {name: name for name in weights.expected(shape, found.names)}, "")


def _info(
    path: Path, found: Family, shape: BackboneShape, stored: dict[str, str], fingerprint: str
) -> BackboneInfo:
    layer_modules = {op: tuple(module.path for module in found.names.ops[op]) for op in BASE_OPS}
    return BackboneInfo(
        path=path,
        shape=shape,
        module_paths=tuple(
            f"{found.names.layer.format(layer)}.{module}"
            for layer in range(shape.layers)
            for op in BASE_OPS
            for module in layer_modules[op]
        ),
        layer_modules=layer_modules,
        fingerprint=fingerprint,
        family=found,
        stored=stored,
    )


def _read_config(path: Path) -> tuple[Family, BackboneShape]:
    if not path.is_dir():
        raise UserError(f"The backbone {path} is not a directory.")
    refuse_megatron(path)
    return _read_file(path / "config.json")


def _read_file(path: Path) -> tuple[Family, BackboneShape]:
    raw = read_json(path)
    found = family(raw.get("model_type", ""))
    return found, found.shape(config.complete(found, raw, path))
