"""The stream of a case of any depth, from traces of few layers.

A group of layers repeats: one layer, or as many as a pattern of kinds has (of attention, of MLPs). The first group may
have more: layers outside the pattern; and the second layer may be unlike those above it, if it is the last one whose
backward pass needs something that all layers share (the rotary embedding of a prefix-tuned Llama, whose first layer
needs no gradient of its queries).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_mux.memory.stream.events import Stream, StreamError
from megatron_mux.memory.stream.extension import Grouping, extended
from megatron_mux.memory.trace.case import Case

_MOST_FIRST, _LONGEST = 9, 24
"""Maximum number of layers before a pattern, and of its layers."""
_BY_LAYER = ("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "exclude_modules")
"""Fields of peft's config classes that may treat layers differently."""

Tracer = Callable[[Sequence[Case]], Iterable[Stream]]


def step(case: Case, trace: Tracer) -> Stream:
    """The stream of a case: traced as it is if it has few layers, else extended.

    Raises:
        WorkerError: A trace failed.
        StreamError: Traces of few layers do not line up.
    """
    failed: StreamError | None = None
    groupings = _groupings(case)
    for grouping in groupings:
        two, three = trace(_pair(case, grouping))
        try:
            return extended(two, three, case.layers, grouping)
        except StreamError as error:
            failed = error
    if failed is not None and case.layers > 4 * groupings[0].size + 4:
        raise failed
    (whole,) = trace([case])
    return whole


def few(case: Case) -> list[Case]:
    """The cases that `step` traces first."""
    return next((_pair(case, grouping) for grouping in _groupings(case)), [case])


def _pair(case: Case, grouping: Grouping) -> list[Case]:
    """Two groups of layers, and three."""
    return [replace(case, layers=grouping.layers(groups)) for groups in (2, 3)]


def _groupings(case: Case) -> list[Grouping]:
    """Groupings to try, if the case has at least three of their groups."""
    if tells_layers_apart(case.adapter):
        return []
    first, size = pattern(case.kinds)
    found = [Grouping(least, size) for least in _first_groups(case.layers, first, size)]
    return [grouping for grouping in found if (grouping.groups(case.layers) or 0) >= 3]


def pattern(kinds: Sequence[int]) -> tuple[int, int]:
    """How kinds of layers repeat: the number of layers before the pattern, and the pattern's length."""
    count = len(kinds)
    found = (
        (first, size)
        for first in range(min(count, _MOST_FIRST))
        for size in range(1, min((count - first) // 2, _LONGEST) + 1)
        if all(kinds[i] == kinds[i - size] for i in range(first + size, count))
    )
    return min(found, key=sum, default=(0, max(1, count)))


def tells_layers_apart(adapter: Mapping[str, Any] | None) -> bool:
    """Whether an adapter may differ between layers, or be missing in some."""
    if adapter is None:
        return False
    if any(adapter.get(name) for name in _BY_LAYER):
        return True
    targets = adapter.get("target_modules") or ()
    if isinstance(targets, str):  # a regular expression
        return targets != "all-linear"
    return any(part.isdigit() for target in targets for part in target.split("."))


def _first_groups(layers: int, first: int, size: int) -> list[int]:
    """The two smallest sizes of the first group that leave a whole number of groups."""
    least = first + (layers - first) % size
    least = least or size
    return [least + size * more for more in range(2)]
