"""The stream of a case of any depth, from traces of the fewest layers that tell.

What repeats with depth is a group of layers: one layer, or as many as a pattern of kinds has (of attention, of MLPs).
The first group may have more: layers that are of no pattern; and a layer above the first may be unlike those above it,
as it is the last one to need what all layers share (the rotary turns of a prefix-tuned Llama, whose first layer needs
no gradient of its queries).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_mux.memory.stream.events import Category, Moment, Stream, StreamBuilder, StreamError
from megatron_mux.memory.stream.extension import extended
from megatron_mux.memory.trace.case import Case

_MARK = "|"
_MOST_FIRST, _LONGEST = 9, 24
"""Patterns with more layers before them, or longer ones, are not looked for."""
_BY_LAYER = ("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "exclude_modules")
"""Fields of peft's config classes that tell layers apart, or may."""

Tracer = Callable[[Sequence[Case]], Iterable[Stream]]


@dataclass(frozen=True)
class Grouping:
    """How layers are taken together.

    Attributes:
        first: Layers of the first group.
        size: Layers of every other group.
        further: Layers that the last group has beyond these.
    """

    first: int = 1
    size: int = 1
    further: int = 0

    def layers(self, groups: int) -> int:
        """Layers of so many groups."""
        return self._start(groups) + self.further

    def group(self, layer: int, groups: int) -> tuple[int, int]:
        """A layer's group among so many, and its place there."""
        if layer < self.first:
            return 0, layer
        group = min((layer - self.first) // self.size + 1, groups - 1)
        return group, layer - self._start(group)

    def layer(self, group: int, place: int) -> int:
        """The layer at a place of a group."""
        return self._start(group) + place

    def groups(self, layers: int) -> int | None:
        """How many groups so many layers are; None if they are no whole number of them, or fewer than two."""
        more, left = divmod(layers - self.first - self.further, self.size)
        return more + 1 if more > 0 and not left else None

    def _start(self, group: int) -> int:
        return self.first + self.size * (group - 1) if group else 0


def step(case: Case, trace: Tracer) -> Stream:
    """The stream of a case: traced as it is where it has few layers, else extended.

    Args:
        case: Of any depth.
        trace: Traces cases, `Tracer.traced` for instance.

    Raises:
        WorkerError: A trace failed.
        StreamError: Traces of few layers do not line up.
    """
    failed: StreamError | None = None
    groupings = _groupings(case)
    for grouping in groupings:
        two, three = trace(_pair(case, grouping))
        try:
            return extended_by(two, three, case.layers, grouping)
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
    """How layers may be taken together, where that is of use."""
    if tells_layers_apart(case.adapter):
        return []
    first, size = pattern(case.kinds)
    found = [Grouping(least, size) for least in _first_groups(case.layers, first, size)]
    return [grouping for grouping in found if (grouping.groups(case.layers) or 0) >= 3]


def extended_by(two: Stream, three: Stream, layers: int, grouping: Grouping) -> Stream:
    """The stream of any depth from those of two groups and of three.

    Raises:
        StreamError: They do not line up, or so many layers are no whole number of groups.
    """
    groups = grouping.groups(layers)
    if groups is None:
        raise StreamError(f"{layers} layers are not {grouping.first} and then groups of {grouping.size}")
    if grouping == Grouping():
        return extended(two, three, layers)

    def together(moment: Moment, groups: int) -> Moment:
        if moment.layer is None:
            return moment
        group, place = grouping.group(moment.layer, groups)
        return Moment(moment.phase, group, f"{place}{_MARK}{moment.operator}")

    def apart(moment: Moment) -> Moment:
        if moment.layer is None:
            return moment
        place, operator = moment.operator.split(_MARK, 1)
        return Moment(moment.phase, grouping.layer(moment.layer, int(place)), operator)

    small, large = (
        renamed(stream, partial(together, groups=count)) for stream, count in ((two, 2), (three, 3))
    )
    return renamed(extended(small, large, groups), apart)


def pattern(kinds: Sequence[int]) -> tuple[int, int]:
    """How kinds of layers repeat: how many layers come first that do not, and after how many the others do.

    Args:
        kinds: A number for each layer.
    """
    count = len(kinds)
    found = (
        (first, size)
        for first in range(min(count, _MOST_FIRST))
        for size in range(1, min((count - first) // 2, _LONGEST) + 1)
        if all(kinds[i] == kinds[i - size] for i in range(first + size, count))
    )
    return min(found, key=sum, default=(0, max(1, count)))


def tells_layers_apart(adapter: Mapping[str, Any] | None) -> bool:
    """Whether an adapter may be another one in some layers, or be missing there."""
    if adapter is None:
        return False
    if any(adapter.get(name) for name in _BY_LAYER):
        return True
    targets = adapter.get("target_modules") or ()
    if isinstance(targets, str):  # a regular expression
        return targets != "all-linear"
    return any(part.isdigit() for target in targets for part in target.split("."))


def _first_groups(layers: int, first: int, size: int) -> list[int]:
    """Sizes that the first group may have, so that the rest are whole groups: the smallest two."""
    least = first + (layers - first) % size
    least = least or size
    return [least + size * more for more in range(2)]


def renamed(stream: Stream, rename: Callable[[Moment], Moment]) -> Stream:
    """A stream with other names for its moments."""
    builder = StreamBuilder()
    names = [rename(moment) for moment in stream.moment_names]
    for code, at in zip(stream.codes, stream.moments, strict=True):
        if code < 0:
            builder.free(~code, names[at])
        else:
            builder.allocate(
                stream.sizes[code], names[at], stream.streams[code], tuple(Category)[stream.categories[code]]
            )
    return builder.done()
