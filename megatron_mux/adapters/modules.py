"""The linear modules of a backbone that adapters may target, by the names and rules of peft; needs no weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from megatron_mux.base_ops import COLUMN_PARALLEL, BaseOpName, DefaultTargets
from megatron_mux.errors import UserError

ALL_LINEAR = "all-linear"

Targets = str | Sequence[str]
"""`target_modules`: names, `all-linear` or a regular expression."""


class Shape(Protocol):
    """The part of a backbone's shape that adapters use; see `BackboneShape`."""

    @property
    def layers(self) -> int:
        """Transformer layers."""

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def transposed(self) -> bool:
        """Whether linear modules store their weight `[in, out]` (GPT-2's Conv1D); peft wants to be told."""

    @property
    def default_targets(self) -> DefaultTargets:
        """The modules that tasks adapt when they name none."""

    @property
    def sublayer_outputs(self) -> Sequence[str]:
        """Paths within a layer of the modules whose output adds to the hidden states."""

    @property
    def layer_modules(self) -> Mapping[BaseOpName, Sequence[str]]:
        """For each BaseOp, the paths within a layer of the Hugging Face modules inside it."""

    @property
    def module_paths(self) -> Sequence[str]:
        """Full Hugging Face paths of these modules: layer by layer, each in the order of `layer_modules`."""

    def in_features(self, op: BaseOpName) -> int:
        """Full input width of a BaseOp."""

    def out_features(self, op: BaseOpName) -> int:
        """Full output width of a BaseOp."""

    def module_shape(self, path: str) -> tuple[int, int]:
        """Output and input width of one of these modules."""


@dataclass(frozen=True)
class Module:
    """A linear module of the Hugging Face model.

    Attributes:
        path: Full Hugging Face path.
        layer: Index of its layer.
        op: The BaseOp that holds it.
        out_features, in_features: Its full widths.
    """

    path: str
    layer: int
    op: BaseOpName
    out_features: int
    in_features: int

    @property
    def column_parallel(self) -> bool:
        """Whether tensor ranks divide its output; else they divide its input."""
        return self.op in COLUMN_PARALLEL


def modules_of(shape: Shape) -> Sequence[Module]:
    """All modules of a backbone, in the order of `Shape.module_paths`."""
    layer = [(op, *shape.module_shape(path)) for op, paths in shape.layer_modules.items() for path in paths]
    return _modules(tuple(shape.module_paths), tuple(layer))


@lru_cache(maxsize=8)
def _modules(paths: tuple[str, ...], layer: tuple[tuple[BaseOpName, int, int], ...]) -> tuple[Module, ...]:
    """The modules of these paths; layers are alike."""
    return tuple(Module(path, i // len(layer), *layer[i % len(layer)]) for i, path in enumerate(paths))


def match_targets(targets: Targets, modules: Sequence[Module]) -> list[Module]:
    """The modules that `targets` names.

    Args:
        targets: Names, each matching the modules whose path is it or ends in it after a dot; or `all-linear`; or
            any other string: a regular expression that must match a whole path.
        modules: All modules of the backbone.

    Returns:
        Matching modules, in the order of `modules`.

    Raises:
        UserError: A name (or the expression) matches nothing; lists what there is.
    """
    if isinstance(targets, str):
        return _match_text(targets, modules)
    unknown = [t for t in targets if not any(_matches(t, module.path) for module in modules)]
    if unknown:
        listed = ", ".join(repr(name) for name in unknown)
        verb = "is no module" if len(unknown) == 1 else "are no modules"
        raise UserError(f"target_modules: {listed} {verb} of this backbone: choose from {_choices(modules)}")
    return [module for module in modules if any(_matches(t, module.path) for t in targets)]


def _match_text(text: str, modules: Sequence[Module]) -> list[Module]:
    if text.lower() == ALL_LINEAR:
        return list(modules)
    try:
        expression = re.compile(text)
    except re.error as error:
        raise UserError(f"target_modules: {text!r} is not a regular expression: {error}") from None
    found = [module for module in modules if expression.fullmatch(module.path)]
    if not found:
        raise UserError(f"target_modules: no module matches {text!r}: choose from {_choices(modules)}")
    return found


def short_names(paths: Iterable[str]) -> list[str]:
    """The distinct last parts of the paths, in order; as targets they match all modules of the same names."""
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))


def _matches(target: str, path: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _choices(modules: Sequence[Module]) -> str:
    return ", ".join(short_names(module.path for module in modules)) + f", or {ALL_LINEAR!r}"
