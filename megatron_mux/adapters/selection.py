"""Fields of peft that narrow `target_modules`, and fields with a value for each module's path, by the rules of peft."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import PlainValidator

from megatron_mux.adapters.targets import ends
from megatron_mux.errors import UserError
from megatron_mux.section import LARGEST_SIZE, problem, shown
from megatron_mux.shape import Module

Value = TypeVar("Value")

_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")
"""The first number in a path: without `layers_pattern`, the index of a layer."""

_NAME = re.compile(r"[\w.-]+")
"""Expressions in which only dots are special."""


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        if _NAME.fullmatch(pattern):
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            raise problem(f"{pattern!r} is not a regular expression: {error}") from None


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_SIZE


def _ranks(value: Any) -> dict[str, int]:
    if not _has_names(value) or not all(_is_whole(rank, 1) for rank in (value or {}).values()):
        raise problem(
            f"must map ends of modules' paths to ranks, whole numbers of at least 1, such as {{q_proj: 16}}, got "
            f"{shown(value)}"
        )
    _check_patterns(value or ())
    return dict(value or {})


def _alphas(value: Any) -> dict[str, float]:
    numbers = [*(value or {}).values()] if _has_names(value) else [None]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and 0 < n < math.inf for n in numbers):
        raise problem(
            f"must map ends of modules' paths to numbers greater than 0, such as {{q_proj: 32}}, got {shown(value)}"
        )
    _check_patterns(value or ())
    return dict(value or {})


def _has_names(value: Any) -> bool:
    """Whether it is a mapping of texts, or nothing."""
    return value is None or (
        isinstance(value, dict) and all(isinstance(name, str) and name for name in value)
    )


def _layers(value: Any) -> list[int] | int | None:
    listed = value if isinstance(value, list) else [value]
    if value is not None and not all(_is_whole(layer, 0) for layer in listed):
        raise problem(f"must be the index of a layer from 0, or a list of such, got {shown(value)}")
    return list(value) if isinstance(value, list) else value


def _layers_pattern(value: Any) -> list[str] | str | None:
    listed = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(name, str) for name in listed):
        raise problem(
            f"must be the name of the list of layers, such as layers, or several, got {shown(value)}"
        )
    _check_patterns(listed if value is not None else ())
    return value  # type: ignore[no-any-return]


Ranks = Annotated[dict[str, int], PlainValidator(_ranks)]
"""Ranks by the end of a module's path, or a regular expression for it."""

Alphas = Annotated[dict[str, float], PlainValidator(_alphas)]
"""Numerators of scales, likewise."""

Layers = Annotated[list[int] | int | None, PlainValidator(_layers)]
"""Indices of layers, or one of them."""

LayersPattern = Annotated[list[str] | str | None, PlainValidator(_layers_pattern)]
"""Names of the list of layers, as regular expressions."""


class _Patterns:
    """Regular expressions for ends of modules' paths, each compiled once.

    Most are names, in which only dots are special. They are looked up, so that a path takes as long with thousands of
    them as with one: a name matches an end of a path if it is that end with dots in place of some characters.

    Args:
        patterns: As keys of `rank_pattern` in peft, which matches `(.*\\.)?(PATTERN)$`.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._names: dict[str, int] = {}
        self._dots: dict[int, set[tuple[int, ...]]] = defaultdict(set)  # of names, by their length
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        for i, pattern in enumerate(patterns):
            if _NAME.fullmatch(pattern):
                self._names[pattern] = i
                self._dots[len(pattern)].add(tuple(at for at, char in enumerate(pattern) if char == "."))
            else:
                self._expressions.append((i, re.compile(rf"(.*\.)?({pattern})$")))

    def matching(self, path: str) -> set[int]:
        """Numbers of the patterns that match a module's path, or its end after a dot."""
        matches = {i for i, expression in self._expressions if expression.match(path)}
        for end in ends(path):
            for dots in self._dots.get(len(end), ()):
                characters = list(end)
                for at in dots:
                    characters[at] = "."
                matches.add(self._names.get("".join(characters), -1))
        return matches - {-1}


_compiled = lru_cache(maxsize=16)(_Patterns)


def value_of(patterns: Mapping[str, Value], path: str, default: Value) -> Value:
    """The value of the first pattern that matches a module's path, or its end after a dot."""
    if not patterns:
        return default
    keys = tuple(patterns)
    first = min(_compiled(keys).matching(path), default=None)
    return default if first is None else patterns[keys[first]]


def check_matched(name: str, patterns: Mapping[str, Any], modules: Sequence[Module]) -> None:
    """Refuse patterns that match none of the targeted modules.

    Raises:
        UserError: There are some.
    """
    keys = tuple(patterns)
    matched = set[int]().union(*(_compiled(keys).matching(module.path) for module in modules if keys))
    for i, pattern in enumerate(keys):
        if i not in matched:
            raise UserError(
                f"{name}: {pattern!r} matches no module that the task targets: leave it out, or write the end of a "
                "module's path, or a regular expression for it"
            )


def without(
    excluded: str | Sequence[str] | None, modules: Sequence[Module], strict: bool = True
) -> list[Module]:
    """The modules that `exclude_modules` leaves.

    Args:
        excluded: Names, each excluding the modules whose path is it or ends in it after a dot; or a regular expression
            for whole paths.
        strict: Whether it must exclude some.

    Raises:
        UserError: It excludes none of them, or all.
    """
    if not excluded:
        return list(modules)
    if isinstance(excluded, str):
        left = [module for module in modules if not re.fullmatch(excluded, module.path)]
    else:
        names = frozenset(excluded)
        left = [module for module in modules if names.isdisjoint(ends(module.path))]
    if not left or (strict and len(left) == len(modules)):
        which = "all modules" if not left else "no module"
        raise UserError(f"exclude_modules: {excluded!r} excludes {which} that target_modules names")
    return left


def within_layers(
    layers: Sequence[int] | int | None,
    pattern: Sequence[str] | str | None,
    targets: Sequence[str],
    modules: Sequence[Module],
    strict: bool = True,
) -> list[Module]:
    """The modules that `layers_to_transform` and `layers_pattern` leave; those named by their whole path stay.

    Args:
        layers: Indices of layers; None or an empty list leaves all.
        pattern: What stands before the index in a path; by default any name.
        strict: Whether each of the layers must have one of them.

    Raises:
        UserError: The backbone lacks such a layer, or no module is left.
    """
    if layers is None or layers == []:
        return list(modules)
    wanted = {layers} if isinstance(layers, int) else set(layers)
    lists = [re.compile(rf"(?:^|.*?\.){name}\.(?P<index>\d+)\.") for name in _listed(pattern)]
    indices = {module.path: _index(module.path, lists or [_FIRST_INDEX]) for module in modules}
    lacking = sorted(wanted - {module.layer for module in modules})
    if lacking and strict:
        raise UserError(f"layers_to_transform: no targeted module is in layer {lacking[0]} of the backbone")
    left = [module for module in modules if module.path in targets or indices[module.path] in wanted]
    if not left:
        raise UserError(f"layers_pattern: {pattern!r} leaves no module of layers {sorted(wanted)}")
    return left


def _listed(value: Sequence[str] | str | None) -> Sequence[str]:
    return [value] if isinstance(value, str) and value else value or ()


def _index(path: str, patterns: Sequence[re.Pattern[str]]) -> int | None:
    matched = next((match for pattern in patterns if (match := pattern.match(path))), None)
    return None if matched is None else int(matched["index"])
