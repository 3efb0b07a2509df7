"""Which Hugging Face modules a task targets, by peft's rules; needs neither weights nor torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from megatron_mux.errors import UserError

ALL_LINEAR = "all-linear"

# Modules whose output adds to the residual stream: Megatron's row-parallel linear_proj and linear_fc2.
_SUBLAYER_OUTPUTS = frozenset({"o_proj", "out_proj", "down_proj", "fc2", "c_proj"})

# What peft targets when the task names nothing (peft 0.21, peft/utils/constants.py).
_LORA_DEFAULT: Mapping[str, list[str]] = {"gpt2": ["c_attn"]}
_IA3_DEFAULT: Mapping[str, list[str]] = {
    "gpt2": ["c_attn", "mlp.c_proj"],
    "gpt_neo": ["q_proj", "v_proj", "c_proj"],
    "opt": ["q_proj", "k_proj", "fc2"],
    "llama": ["k_proj", "v_proj", "down_proj"],
    "mistral": ["k_proj", "v_proj", "down_proj"],
}
_FEEDFORWARD_DEFAULT: Mapping[str, list[str]] = {
    "gpt2": ["mlp.c_proj"],
    "gpt_neo": ["c_proj"],
    "opt": ["fc2"],
}
_BOTTLENECK_DEFAULT: Mapping[str, list[str]] = {
    "gpt2": ["attn.c_proj", "mlp.c_proj"],
    "gpt_neo": ["out_proj", "c_proj"],
    "opt": ["out_proj", "fc2"],
}

# Families whose linear modules store their weight [in, out] (GPT-2's Conv1D); peft wants to be told.
CONV1D_FAMILIES = frozenset({"gpt2"})


class Sizes(Protocol):
    """The part of a backbone's shape that adapters use."""

    @property
    def family(self) -> str:
        """`model_type` of the Hugging Face config."""

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

    @property
    def ffn(self) -> int:
        """Inner width of the MLP."""


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


def default_targets(peft_type: str, family: str) -> list[str]:
    """What a method targets when the task does not say: peft's choice; for methods peft lacks, LoRA's.

    A bottleneck follows every sublayer (Houlsby et al., 2019).
    """
    if peft_type == "IA3":
        return list(_IA3_DEFAULT.get(family, ["q_proj", "v_proj", "down_proj"]))
    if peft_type == "BOTTLENECK":
        return list(_BOTTLENECK_DEFAULT.get(family, ["o_proj", "down_proj"]))
    return list(_LORA_DEFAULT.get(family, ["q_proj", "v_proj"]))


def targets_of(spec: Any, family: str) -> str | list[str]:
    """The `target_modules` of an `adapter` section, or the default where it has none (prefix tuning: everything)."""
    targets = getattr(spec, "target_modules", None)
    if targets is not None:
        return targets if isinstance(targets, str) else list(targets)
    return ALL_LINEAR if spec.peft_type == "PREFIX_TUNING" else default_targets(spec.peft_type, family)


def default_feedforward(family: str) -> list[str]:
    """IA3's `feedforward_modules` when the task does not say: peft's choice."""
    return list(_FEEDFORWARD_DEFAULT.get(family, ["down_proj"]))


def is_sublayer_output(path: str) -> bool:
    """Whether the module's output adds to the residual stream (attention's or the MLP's last projection)."""
    return _leaf(path) in _SUBLAYER_OUTPUTS


def check_bottleneck(paths: Iterable[str]) -> None:
    """Refuse bottleneck targets other than the ends of sublayers.

    A bottleneck sees the whole output of what it follows. Elsewhere that output is divided over tensor ranks and is
    a head's query, key or value, where no published method puts one.

    Raises:
        UserError: Names those targets.
    """
    wrong = dict.fromkeys(_leaf(path) for path in paths if not is_sublayer_output(path))
    if wrong:
        raise UserError(
            f"target_modules: a BOTTLENECK follows the end of an attention or MLP sublayer, not {', '.join(wrong)}: "
            "choose from their last projections (o_proj, out_proj, down_proj, fc2, c_proj: as the backbone has them)"
        )


def module_shape(path: str, sizes: Sizes) -> tuple[int, int]:
    """Output and input width of a Hugging Face module of a known family, by its name."""
    leaf, heads, keys = _leaf(path), sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    if leaf in ("q_proj", "k_proj", "v_proj"):
        return (heads if leaf == "q_proj" else keys), sizes.hidden
    if leaf == "c_attn":
        return heads + 2 * keys, sizes.hidden
    if leaf in ("down_proj", "fc2") or path.endswith("mlp.c_proj"):
        return sizes.hidden, sizes.ffn
    if leaf in _SUBLAYER_OUTPUTS:
        return sizes.hidden, heads
    return sizes.ffn, sizes.hidden


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
