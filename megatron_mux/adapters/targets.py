"""Which linear modules of a backbone a task's `target_modules` names, by the rules of peft."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megatron_mux.errors import UserError
from megatron_mux.shape import Module

ALL_LINEAR = "all-linear"

Targets = str | Sequence[str]
"""`target_modules`: names, `all-linear` or a regular expression."""


_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate_up_proj", "experts")
"""Names by which people mean routed experts."""


_OUTSIDE_LAYERS = ("embed_tokens", "lm_head", "wte", "wpe", "embed_positions", "embed_out")
"""Names of embeddings and output layers."""


def match_targets(targets: Targets, modules: Sequence[Module]) -> list[Module]:
    """The modules that `targets` names. `all-linear` names no routed experts: their parameters are no linear modules.

    Args:
        targets: Names, each matching the modules whose path is it or ends in it after a dot; or `all-linear`; or
            any other string: a regular expression that must match a whole path.

    Returns:
        Matching modules, in the order of `modules`.

    Raises:
        UserError: A name (or the expression) matches nothing; lists what there is.
    """
    routed = [module for module in modules if module.experts]
    modules = [module for module in modules if not module.experts]
    if isinstance(targets, str):
        return _match_text(targets, modules)
    if routed:
        _refuse_experts(targets)
    known = {end for module in modules for end in ends(module.path)}
    unknown = [name for name in targets if name not in known]
    _refuse_outside(unknown, modules)
    if unknown:
        listed = ", ".join(repr(name) for name in unknown)
        verb = "is no module" if len(unknown) == 1 else "are no modules"
        raise UserError(f"target_modules: {listed} {verb} of this backbone: choose from {_choices(modules)}")
    names = frozenset(targets)
    return [module for module in modules if not names.isdisjoint(ends(module.path))]


def match_parameters(targets: Sequence[str], modules: Sequence[Module]) -> list[Module]:
    """The parameters that `target_parameters` names: of routed experts, or weights of linear modules beside them.

    Args:
        targets: Names, each matching the parameters whose path is it or ends in it after a dot. The weight of a linear
            module gets the adapter that the module would: shared experts have no other name in peft.

    Raises:
        UserError: A name matches nothing; lists what there is.
    """
    routed = [module for module in modules if module.experts]
    paths = {m.path: m for m in routed} | {f"{m.path}.weight": m for m in modules if routed and not m.experts}
    names, known = frozenset(targets), {end for path in paths for end in ends(path)}
    unknown = [name for name in targets if name not in known]
    if unknown:
        has = ", ".join(f"mlp.experts.{name}" for name in short_names(routed)) or "none"
        raise UserError(
            f"target_parameters: {', '.join(map(repr, unknown))} named, but the parameters of routed experts in this "
            f"backbone are: {has}; weights of linear modules are named as in shared_experts.up_proj.weight"
        )
    return [module for path, module in paths.items() if not names.isdisjoint(ends(path))]


def _refuse_experts(targets: Sequence[str]) -> None:
    """Refuse names by which people mean routed experts too, though modules beside those may have them."""
    named = [name for name in targets if name in _OF_EXPERTS]
    if named:
        raise UserError(
            f"target_modules: {', '.join(map(repr, named))} would adapt routed experts, which are no modules: "
            "name them in target_parameters (of LORA: mlp.experts.gate_up_proj, mlp.experts.down_proj), and other "
            "modules by more of their path (shared_experts.up_proj)"
        )


def _refuse_outside(unknown: Sequence[str], modules: Sequence[Module]) -> None:
    """Refuse names of embeddings and output layers, and say how these are trained."""
    outside = [name for name in unknown if name.rpartition(".")[2] in _OUTSIDE_LAYERS]
    if outside:
        raise UserError(
            f"target_modules: {', '.join(map(repr, outside))}: embeddings and output layers can have no adapter: train "
            f"them whole with modules_to_save (of LORA, LOHA, VERA and IA3), and name modules of layers here: "
            f"{_choices(modules)}"
        )


def _match_text(text: str, modules: Sequence[Module]) -> list[Module]:
    if text.lower() == ALL_LINEAR:
        return list(modules)
    try:
        expression = re.compile(text)
    except re.error as error:
        raise UserError(f"target_modules: {text!r} is not a regular expression: {error}") from None
    matched = [module for module in modules if expression.fullmatch(module.path)]
    if not matched:
        _refuse_outside([text], modules)
        raise UserError(f"target_modules: no module matches {text!r}: choose from {_choices(modules)}")
    return matched


def short_names(modules: Iterable[Module]) -> list[str]:
    """The distinct last parts of modules' paths, in order; as targets they match all modules of the same names."""
    return list(dict.fromkeys(module.path.rpartition(".")[2] for module in modules))


def matches(target: str, path: str) -> bool:
    """Whether a name is a path or the end of one."""
    return path == target or path.endswith(f".{target}")


def ends(path: str) -> list[str]:
    """The names that match a path: itself, and what follows each of its dots."""
    parts = path.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def _choices(modules: Sequence[Module]) -> str:
    return ", ".join(short_names(modules)) + f", or {ALL_LINEAR!r}"
