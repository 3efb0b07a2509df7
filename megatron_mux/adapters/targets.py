"""Which Hugging Face modules a task targets, by peft's rules; needs neither weights nor torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from megatron_mux.base_ops import DefaultTargets
from megatron_mux.errors import UserError

ALL_LINEAR = "all-linear"


class Sizes(Protocol):
    """The part of a backbone's shape that adapters use."""

    @property
    def default_targets(self) -> DefaultTargets:
        """The modules that tasks adapt when they name none."""

    @property
    def sublayer_outputs(self) -> Sequence[str]:
        """Paths within a layer of the modules whose output adds to the hidden states."""

    @property
    def transposed(self) -> bool:
        """Whether linear modules store their weight `[in, out]` (GPT-2's Conv1D); peft wants to be told."""

    def module_shape(self, path: str) -> tuple[int, int]:
        """Output and input width of a linear module, by its Hugging Face path."""

    @property
    def layers(self) -> int:
        """Transformer layers."""

    @property
    def hidden(self) -> int:
        """Width of hidden states."""

    @property
    def heads(self) -> int:
        """Attention heads."""

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""


def match_targets(targets: str | Sequence[str], module_paths: Sequence[str]) -> list[str]:
    """The modules that `targets` names.

    Args:
        targets: Names, each matching the modules whose path is it or ends in it after a dot; or `all-linear`; or
            any other string: a regular expression that must match a whole path.
        module_paths: Full paths of all modules of all BaseOps.

    Returns:
        Matching paths, in the order of `module_paths`.

    Raises:
        UserError: A name (or the expression) matches nothing; lists what there is.
    """
    if isinstance(targets, str):
        if targets.lower() == ALL_LINEAR:
            return list(module_paths)
        try:
            expression = re.compile(targets)
        except re.error as error:
            raise UserError(f"target_modules: {targets!r} is not a regular expression: {error}") from None
        found = [path for path in module_paths if expression.fullmatch(path)]
        if not found:
            raise UserError(
                f"target_modules: no module matches {targets!r}: choose from {_names(module_paths)}"
            )
        return found
    unknown = [t for t in targets if not any(_matches(t, path) for path in module_paths)]
    if unknown:
        said = ", ".join(repr(name) for name in unknown)
        verb = "is no module" if len(unknown) == 1 else "are no modules"
        raise UserError(f"target_modules: {said} {verb} of this backbone: choose from {_names(module_paths)}")
    return [path for path in module_paths if any(_matches(t, path) for t in targets)]


def match_feedforward(names: str | Sequence[str], targets: Sequence[str]) -> list[str]:
    """Those of the targeted paths whose input IA3 scales: peft asks whether the path ends in a name, dot or not."""
    if isinstance(names, str):
        return [path for path in targets if re.fullmatch(names, path)]
    return [path for path in targets if any(path.endswith(name) for name in names)]


def targets_of(spec: Any, shape: Sizes) -> str | list[str]:
    """The `target_modules` of an `adapter` section, or the default of the backbone's family where it has none.

    Args:
        spec: The section.
        shape: The backbone's. Methods that peft lacks default to LoRA's targets, a bottleneck to every sublayer's
            output (Houlsby et al., 2019), prefix tuning to everything.
    """
    targets = getattr(spec, "target_modules", None)
    if targets is not None:
        return targets if isinstance(targets, str) else list(targets)
    if spec.peft_type == "PREFIX_TUNING":
        return ALL_LINEAR
    default = shape.default_targets
    return list({"IA3": default.ia3, "BOTTLENECK": default.bottleneck}.get(spec.peft_type, default.lora))


def feedforward_of(spec: Any, shape: Sizes) -> str | list[str]:
    """The `feedforward_modules` of an IA3 section, or the default of the backbone's family where it has none."""
    given: str | list[str] | None = spec.feedforward_modules
    return list(shape.default_targets.ia3_feedforward) if given is None else given


def check_bottleneck(paths: Iterable[str], shape: Sizes) -> None:
    """Refuse bottleneck targets other than the ends of sublayers.

    A bottleneck sees the whole output of what it follows. Elsewhere that output is divided over tensor ranks and is
    a head's query, key or value, where no published method puts one.

    Args:
        paths: Full paths of the targets.
        shape: The backbone's.

    Raises:
        UserError: Names those targets.
    """
    outputs = shape.sublayer_outputs
    wrong = dict.fromkeys(_leaf(path) for path in paths if not any(_matches(end, path) for end in outputs))
    if wrong:
        raise UserError(
            f"target_modules: a BOTTLENECK follows the end of an attention or MLP sublayer, not {', '.join(wrong)}: "
            f"choose from {', '.join(outputs)}"
        )


def _matches(target: str, path: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _names(module_paths: Sequence[str]) -> str:
    """The distinct names of the modules; with their parent where the name alone is ambiguous."""
    return ", ".join(short_names(module_paths)) + f", or {ALL_LINEAR!r}"


def short_names(module_paths: Sequence[str]) -> list[str]:
    """The distinct last parts of the paths, in order; as targets they match all modules of the same names."""
    return list(dict.fromkeys(_leaf(path) for path in module_paths))
