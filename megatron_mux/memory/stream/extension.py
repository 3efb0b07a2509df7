"""Extends a step from two and three groups of layers to any depth, event for event.

A group is one layer, or as many as a pattern of unlike layers has (see `Grouping`). A step consists of sections outside
layers and of visits to all groups between them: upwards in a forward pass, downwards in a backward pass, either way in
the optimizer, once for each of its operators if it processes all tensors at once (foreach). In a visit, the events of a
group are contiguous. The first and the last group may differ from the others, which are all alike.

The block that an event frees is located by a part of the step, a group, and an offset in that group's events. The group
is counted

- from the one that frees it, for groups between the first and the last (each treats its neighbours alike);
- from the first or the last, otherwise: comparing the steps of two and of three groups shows which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_mux.memory.stream.events import CATEGORIES, Moment, Stream, StreamBuilder, StreamError

_MIDDLE = 1
"""The group of three that all further groups are like."""


@dataclass(frozen=True)
class Grouping:
    """How layers form groups.

    Attributes:
        first: Layers of the first group.
        size: Layers of every other group.
        further: Additional layers of the last group.
    """

    first: int = 1
    size: int = 1
    further: int = 0

    def layers(self, groups: int) -> int:
        """Number of layers of so many groups."""
        return self.start(groups) + self.further

    def group(self, layer: int, groups: int) -> int:
        """The group of a layer, if there are so many groups."""
        return 0 if layer < self.first else min((layer - self.first) // self.size + 1, groups - 1)

    def start(self, group: int) -> int:
        """The first layer of a group."""
        return self.first + self.size * (group - 1) if group else 0

    def groups(self, layers: int) -> int | None:
        """Number of groups of so many layers; None if that is no whole number, or below two."""
        more, left = divmod(layers - self.first - self.further, self.size)
        return more + 1 if more > 0 and not left else None


@dataclass(frozen=True)
class _Part:
    """Events outside layers, or a visit to all groups.

    Attributes:
        blocks: Indices of the events outside layers, or of each group's events, by group.
        order: Order of the visit: 1 upwards, -1 downwards; 0 outside layers.
    """

    blocks: tuple[range, ...]
    order: int


@dataclass(frozen=True)
class _Place:
    """Position of an event: its part, its group (0 outside layers), its offset in the group's block."""

    part: int
    group: int
    offset: int


def extended(
    two: Stream,
    three: Stream,
    layers: int,
    grouping: Grouping = Grouping(),
    begins: tuple[int, int, int] = (0, 0, 0),
) -> Stream:
    """The stream of a step with any number of layers.

    The moments of events that every layer has carry the layer's number; events between two layers carry that of one of
    them. Frees outside layers may lack it if they go through the layers in order. Outside layers, sizes may depend on
    the depth linearly (a buffer for all gradient norms).

    Args:
        two: The step with two groups of layers.
        layers: Number of layers, at least two groups.
        begins: Number of the first layer in `two`, in `three` and in the result.

    Raises:
        StreamError: The two steps do not line up, or so many layers are no whole number of groups.
    """
    groups = grouping.groups(layers)
    if groups is None:
        raise StreamError(f"{layers} layers are not {grouping.first} and then groups of {grouping.size}")
    small, large = _Outline(two, 2, grouping, begins[0]), _Outline(three, 3, grouping, begins[1])
    _line_up(small, large)
    rules = _Rules(small, large)
    return two if groups == 2 else _built(large, rules, groups, begins[2])


class _Outline:
    """The parts of a step, and the position of each of its events."""

    def __init__(self, stream: Stream, groups: int, grouping: Grouping, begin: int) -> None:
        self.stream = stream
        self.groups = groups
        self.grouping = grouping
        self.begin = begin
        names = [
            None if name.layer is None else grouping.group(name.layer - begin, groups)
            for name in stream.moment_names
        ]
        self.labels = [names[at] for at in stream.moments]
        self.allocated_at = [index for index, code in enumerate(stream.codes) if code >= 0]
        self.parts = self._parts(self.labels, range(len(stream)), strict=True)
        self._places: list[_Place] = []

    def opened(self, section: _Part) -> list[_Part]:
        """Divide a part outside layers anew: a free counts to the layer whose block it frees."""
        labels = list(self.labels)
        for index in section.blocks[0]:
            code = self.stream.codes[index]
            if labels[index] is None and code < 0:
                labels[index] = self.labels[self.allocated_at[~code]]
        return self._parts(labels, section.blocks[0], strict=False)

    def divided_like(self, section: _Part, parts: Sequence[_Part]) -> list[_Part]:
        """Divide a part outside layers of two groups like the same one of three, without the middle group."""
        found, index = [], section.blocks[0].start
        for part in parts:
            kinds = (0, 2)[:: part.order] if part.order else (0,)
            blocks = []
            for kind in kinds:
                blocks.append(range(index, index + len(part.blocks[kind])))
                index = blocks[-1].stop
            found.append(_Part(tuple(blocks[:: part.order or 1]), part.order))
        _check_as_many(self, section.blocks[0], index - section.blocks[0].start)
        return found

    def set_parts(self, parts: list[_Part]) -> None:
        """Fix the parts, and with them the position of every event."""
        self.parts = parts
        places: dict[int, _Place] = {}
        for number, part in enumerate(parts):
            for group, block in enumerate(part.blocks):
                places.update((index, _Place(number, group, at)) for at, index in enumerate(block))
        self._places = [places[index] for index in range(len(self.stream))]

    def is_in_layer(self, index: int) -> bool:
        """Whether an event belongs to a visit."""
        return self.parts[self._places[index].part].order != 0

    def freed(self, index: int) -> _Place:
        """Position of the allocation of the block that an event frees."""
        return self._places[self.allocated_at[~self.stream.codes[index]]]

    def describe(self, index: int) -> str:
        """An event in words."""
        event, layers = self.stream[index], self.grouping.layers(self.groups)
        return f"event {index} of {layers} layers ({event.moment}) {event.kind}s {event.size} bytes"

    def moved(self, moment: Moment, group: int, begin: int = 0) -> Moment:
        """A moment with the layer at the same place of another group."""
        if moment.layer is None:
            return moment
        layer, grouping = moment.layer - self.begin, self.grouping
        place = layer - grouping.start(grouping.group(layer, self.groups))
        return moment._replace(layer=begin + grouping.start(group) + place)

    def _parts(self, labels: Sequence[int | None], events: range, strict: bool) -> list[_Part]:
        """Sections and visits alternately; a section may be empty.

        Raises:
            StreamError: A layer's events are not part of a visit, if `strict`.
        """
        found: list[_Part] = []
        index = begun = events.start
        while index < events.stop:
            visit = None if labels[index] is None else self._visit(labels, index, events.stop)
            if visit is not None:
                found += [_Part((range(begun, index),), 0), visit]
                index = begun = max(block.stop for block in visit.blocks)
                continue
            if strict and labels[index] is not None:
                raise StreamError(
                    f"{self.describe(index)}, and layers are not visited one after the other from there"
                )
            index += 1
        return [*found, _Part((range(begun, index),), 0)]

    def _visit(self, labels: Sequence[int | None], index: int, stop: int) -> _Part | None:
        """The visit to all groups that begins at an event; None if none does.

        If the last group of a visit is also the first of the next one (the backward pass after a forward pass without
        a head), the visit ends with the phases that its other groups have.
        """
        if labels[index] not in (0, self.groups - 1):
            return None
        order = 1 if labels[index] == 0 else -1
        phases: set[str] = set()
        blocks: list[range] = []
        for group in range(self.groups)[::order]:
            begun, last = index, len(blocks) == self.groups - 1
            while index < stop and labels[index] == group:
                phase = self.stream.moment(index).phase
                if last and phase not in phases:
                    break
                phases.add(phase)
                index += 1
            if index == begun:
                return None
            blocks.append(range(begun, index))
        return _Part(tuple(blocks[::order]), order)


def _line_up(small: _Outline, large: _Outline) -> None:
    """Divide both steps into the same parts.

    Raises:
        StreamError: Their events do not allow that.
    """
    orders = [[part.order for part in outline.parts if part.order] for outline in (small, large)]
    if orders[0] != orders[1]:
        words = [" ".join({1: "up", -1: "down"}[order] for order in found) or "never" for found in orders]
        raise StreamError(f"two layers are visited ({words[0]}), three layers ({words[1]})")
    parts: tuple[list[_Part], list[_Part]] = ([], [])
    for mine, other in zip(small.parts, large.parts, strict=True):
        if mine.order or len(mine.blocks[0]) == len(other.blocks[0]):
            parts[0].append(mine)
            parts[1].append(other)
            continue
        opened = large.opened(other)
        parts[0].extend(small.divided_like(mine, opened))
        parts[1].extend(opened)
    small.set_parts(parts[0])
    large.set_parts(parts[1])
    for block, same in _blocks_of_both(small, large):
        _check_as_many(small, block, len(same))


def _blocks_of_both(small: _Outline, large: _Outline) -> Iterator[tuple[range, range]]:
    """Events outside layers, of the first group and of the last, with two groups and with three."""
    for mine, other in zip(small.parts, large.parts, strict=True):
        yield mine.blocks[0], other.blocks[0]
        if mine.order:
            yield mine.blocks[-1], other.blocks[-1]


def _check_as_many(small: _Outline, mine: range, count: int) -> None:
    """Raise StreamError if a block of two groups has another number of events than the same one of three."""
    if len(mine) != count:
        first = f", beginning with {small.describe(mine.start)}" if mine else ""
        raise StreamError(
            f"{len(mine)} events with two layers{first}, are {count} events by what three layers do"
        )


class _Rules:
    """What the steps of two and of three groups show about deeper ones.

    Attributes:
        growth: Additional bytes for each further group of allocations outside layers, by event of three groups.
        from_end: Events of three groups that free a block of a group counted from the last.
    """

    def __init__(self, small: _Outline, large: _Outline) -> None:
        self._small, self._large = small, large
        self.growth: dict[int, int] = {}
        self.from_end: set[int] = set()
        # Positions in the first or last group of three, and the same offsets in the middle group.
        self._twins: dict[_Place, int] = {}
        for mine, other in _blocks_of_both(small, large):
            for one, same in zip(mine, other, strict=True):
                self._compare(one, same)

    def twin(self, place: _Place) -> int:
        """Offset in the middle group's block of what the first or last group has at a position.

        If no event of both steps shows it, it is the allocation with the same moment, size and category, after as many
        such allocations.

        Raises:
            StreamError: There is none.
        """
        if place not in self._twins:
            part = self._large.parts[place.part]
            theirs = {signature: at for at, signature in self._signatures(part.blocks[_MIDDLE])}
            for at, signature in self._signatures(part.blocks[place.group]):
                if signature in theirs:
                    self._twins.setdefault(_Place(place.part, place.group, at), theirs[signature])
        if place not in self._twins:
            index = self._large.parts[place.part].blocks[place.group][place.offset]
            raise StreamError(
                f"{self._large.describe(index)}, for another layer; the layer between has no such block"
            )
        return self._twins[place]

    def _signatures(self, block: range) -> Iterator[tuple[int, object]]:
        """Offsets and distinguishing marks of the allocations in a group's block."""
        seen: Counter[object] = Counter()
        for at, index in enumerate(block):
            event = self._large.stream[index]
            if event.kind == "allocate":
                key = (self._large.moved(event.moment, 0), event.size, event.category)
                seen[key] += 1
                yield at, (key, seen[key])

    def _compare(self, one: int, same: int) -> None:
        """Compare an event of two groups with the same one of three.

        Raises:
            StreamError: They differ.
        """
        mine, other = self._small.stream[one], self._large.stream[same]
        differ = StreamError(f"{self._small.describe(one)}, but {self._large.describe(same)}")
        moments = self._small.moved(mine.moment, 0), self._large.moved(other.moment, 0)
        if mine.kind != other.kind or moments[0] != moments[1]:
            raise differ
        if mine.kind == "allocate":
            growth, in_layer = other.size - mine.size, self._large.is_in_layer(same)
            if mine.category != other.category or (growth and in_layer):
                raise differ
            if growth:
                self.growth[same] = growth
            return
        a, b = self._small.freed(one), self._large.freed(same)
        further = b.group - a.group
        if a.part != b.part or further not in (0, 1):
            raise StreamError(f"{differ} that are allocated elsewhere")
        if further:
            self.from_end.add(same)
        # Of two groups, the second is the last one; of three, the third is.
        kind = 2 if a.group and self._small.parts[a.part].order else a.group
        if kind != b.group:
            self._twins[_Place(b.part, kind, a.offset)] = b.offset
        elif a.offset != b.offset:
            raise StreamError(f"{differ} that are allocated elsewhere")


def _built(large: _Outline, rules: _Rules, groups: int, begin: int) -> Stream:
    """The step with at least three groups."""
    builder = StreamBuilder()
    made: list[list[list[int]]] = []  # block numbers, by part, group and offset; -1 of frees
    names: dict[tuple[int, int], Moment] = {}
    stream = large.stream
    for part in large.parts:
        made.append([[] for _ in range(groups if part.order else 1)])
        for group in range(groups)[:: part.order] if part.order else (0,):
            for index in part.blocks[_kind(group, groups) if part.order else 0]:
                key = (group, stream.moments[index])
                if key not in names:
                    names[key] = large.moved(stream.moment(index), group, begin)
                code, block = stream.codes[index], -1
                if code >= 0:
                    size = stream.sizes[code] + rules.growth.get(index, 0) * (groups - 3)
                    category = CATEGORIES[stream.categories[code]]
                    block = builder.allocate(size, names[key], category)
                else:
                    place = _target(large, rules, index, group if part.order else None, groups)
                    builder.free(made[place.part][place.group][place.offset], names[key])
                made[-1][group].append(block)
    return builder.done()


def _target(large: _Outline, rules: _Rules, index: int, group: int | None, groups: int) -> _Place:
    """Position of the block that is freed by an event of three groups, in a group of many or outside layers."""
    place = large.freed(index)
    if group is not None and _kind(group, groups) == _MIDDLE and large.parts[place.part].order:
        target = group + place.group - _MIDDLE
        offset = place.offset if _kind(target, groups) == place.group else rules.twin(place)
        return _Place(place.part, target, offset)
    if index in rules.from_end:
        return _Place(place.part, place.group + groups - 3, place.offset)
    return place


def _kind(group: int, groups: int) -> int:
    """The group of three that a group is like."""
    return 0 if group == 0 else 2 if group == groups - 1 else _MIDDLE
