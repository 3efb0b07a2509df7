"""From a step of two layers and one of three to a step of any depth, event for event.

A step is sections outside layers, and in between visits of all layers: upwards in a forward pass, downwards in a
backward pass, either way in the optimizer, once for each of its operators if it treats all tensors at once (foreach).
In a visit each layer has one block of events without a gap. The first and the last layer may differ from those between
them, which are all alike. What a free refers to is carried along as a part of the step, a layer and a place in that
layer's block, where the layer is counted

- from the one that frees, for layers between the first and the last (each of them does the same to its neighbours);
- from the first or from the last, for everything else: which of the two, the steps of two and of three layers tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_mux.memory.stream.events import CATEGORIES, Moment, Stream, StreamBuilder, StreamError

_MIDDLE = 1
"""The layer of three that all further layers are like."""


@dataclass(frozen=True)
class _Part:
    """Events outside layers, or a visit of all layers.

    Attributes:
        blocks: Indices of the events outside layers; of a visit, of each layer's events, by layer.
        order: In which the layers are visited: 1 upwards, -1 downwards; 0 outside layers.
    """

    blocks: tuple[range, ...]
    order: int


@dataclass(frozen=True)
class _Place:
    """Where an event stands: its part, its layer there (0 outside layers), its place in that layer's block."""

    part: int
    layer: int
    offset: int


def extended(two: Stream, three: Stream, layers: int) -> Stream:
    """The stream of a step with any number of layers.

    Events that belong to each layer in turn carry its number, wherever they are; those between two layers carry that of
    one of them. Frees outside layers may go without it if they go through the layers in order. Outside layers, sizes
    may depend on the depth linearly (a buffer for all gradient norms).

    Args:
        two: The step with two layers.
        three: The same step with three.
        layers: How many layers there should be, at least 2.

    Raises:
        StreamError: The two steps do not line up: where, and what differs. Or they would need fewer layers than 2.
    """
    if layers < 2:
        raise StreamError(f"a step cannot be cut to {layers} layers: 2 is the least")
    small, large = _Outline(two, 2), _Outline(three, 3)
    _line_up(small, large)
    rules = _Rules(small, large)
    return two if layers == 2 else _built(large, rules, layers)


class _Outline:
    """The parts of a step, and where each of its events stands."""

    def __init__(self, stream: Stream, layers: int) -> None:
        self.stream = stream
        self.layers = layers
        self.labels = [stream.moment(index).layer for index in range(len(stream))]
        self.allocated_at = [index for index, code in enumerate(stream.codes) if code >= 0]
        self.parts = self._parts(self.labels, range(len(stream)), strict=True)
        self._places: list[_Place] = []

    def opened(self, section: _Part) -> list[_Part]:
        """A part outside layers, divided anew: a free counts as the layer's whose block it frees."""
        labels = list(self.labels)
        for index in section.blocks[0]:
            code = self.stream.codes[index]
            if labels[index] is None and code < 0:
                labels[index] = self.labels[self.allocated_at[~code]]
        return self._parts(labels, section.blocks[0], strict=False)

    def divided_like(self, section: _Part, parts: Sequence[_Part]) -> list[_Part]:
        """A part outside layers of two, divided as the same one of three: without the blocks of the middle layer."""
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

    def settle(self, parts: list[_Part]) -> None:
        """Take these parts for good."""
        self.parts = parts
        places: dict[int, _Place] = {}
        for number, part in enumerate(parts):
            for layer, block in enumerate(part.blocks):
                places.update((index, _Place(number, layer, at)) for at, index in enumerate(block))
        self._places = [places[index] for index in range(len(self.stream))]

    def is_in_layer(self, index: int) -> bool:
        """Whether an event is part of a visit."""
        return self.parts[self._places[index].part].order != 0

    def freed(self, index: int) -> _Place:
        """Where the block that an event frees was allocated."""
        return self._places[self.allocated_at[~self.stream.codes[index]]]

    def describe(self, index: int) -> str:
        """An event in words."""
        event = self.stream[index]
        return f"event {index} of {self.layers} layers ({event.moment}) {event.kind}s {event.size} bytes"

    def _parts(self, labels: Sequence[int | None], events: range, strict: bool) -> list[_Part]:
        """Sections and visits in turn; a section may be empty.

        Raises:
            StreamError: A layer's events are not part of a visit, and `strict`.
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
        """The visit of all layers that begins at an event; None if none does.

        Where the layer visited last is the first of the next visit too (the backward pass after a forward pass without
        a head), the visit ends with the phases that the other layers have in it.
        """
        if labels[index] not in (0, self.layers - 1):
            return None
        order = 1 if labels[index] == 0 else -1
        phases: set[str] = set()
        blocks: list[range] = []
        for layer in range(self.layers)[::order]:
            begun, last = index, len(blocks) == self.layers - 1
            while index < stop and labels[index] == layer:
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
        StreamError: They cannot be.
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
    small.settle(parts[0])
    large.settle(parts[1])
    for block, same in _blocks_of_both(small, large):
        _check_as_many(small, block, len(same))


def _blocks_of_both(small: _Outline, large: _Outline) -> Iterator[tuple[range, range]]:
    """Events outside layers, of the first layer and of the last, with two layers and with three."""
    for mine, other in zip(small.parts, large.parts, strict=True):
        yield mine.blocks[0], other.blocks[0]
        if mine.order:
            yield mine.blocks[-1], other.blocks[-1]


def _check_as_many(small: _Outline, mine: range, count: int) -> None:
    """Raises StreamError if a block of two layers has not as many events as the same one of three."""
    if len(mine) != count:
        first = f", beginning with {small.describe(mine.start)}" if mine else ""
        raise StreamError(
            f"{len(mine)} events with two layers{first}, are {count} events by what three layers do"
        )


class _Rules:
    """What two layers and three tell about more.

    Attributes:
        growth: Bytes that an allocation outside layers takes more for each further layer, by its event of three layers.
        from_end: Events of three layers that free a block of a layer counted from the last.
    """

    def __init__(self, small: _Outline, large: _Outline) -> None:
        self._small, self._large = small, large
        self.growth: dict[int, int] = {}
        self.from_end: set[int] = set()
        # Blocks of the first or last layer of three, and the same ones of the middle layer.
        self._twins: dict[_Place, int] = {}
        for mine, other in _blocks_of_both(small, large):
            for one, same in zip(mine, other, strict=True):
                self._compare(one, same)

    def twin(self, place: _Place) -> int:
        """What place in the middle layer's block has what is here in the first or last layer's.

        Where no event of both steps tells, it is the allocation with the same moment, size, stream and category, as
        many such allocations after the block's begin.

        Raises:
            StreamError: There is none.
        """
        if place not in self._twins:
            part = self._large.parts[place.part]
            theirs = {signature: at for at, signature in self._signatures(part.blocks[_MIDDLE])}
            for at, signature in self._signatures(part.blocks[place.layer]):
                if signature in theirs:
                    self._twins.setdefault(_Place(place.part, place.layer, at), theirs[signature])
        if place not in self._twins:
            index = self._large.parts[place.part].blocks[place.layer][place.offset]
            raise StreamError(
                f"{self._large.describe(index)}, for another layer; the layer between has no such block"
            )
        return self._twins[place]

    def _signatures(self, block: range) -> Iterator[tuple[int, object]]:
        """The allocations of a layer's block: place, and what tells them apart."""
        seen: Counter[object] = Counter()
        for at, index in enumerate(block):
            event = self._large.stream[index]
            if event.kind == "allocate":
                key = (event.moment._replace(layer=None), event.size, event.stream, event.category)
                seen[key] += 1
                yield at, (key, seen[key])

    def _compare(self, one: int, same: int) -> None:
        """An event with two layers, and the same with three.

        Raises:
            StreamError: They are not the same.
        """
        mine, other = self._small.stream[one], self._large.stream[same]
        differ = StreamError(f"{self._small.describe(one)}, but {self._large.describe(same)}")
        if (mine.kind, mine.moment._replace(layer=None)) != (other.kind, other.moment._replace(layer=None)):
            raise differ
        if mine.kind == "allocate":
            growth, in_layer = other.size - mine.size, self._large.is_in_layer(same)
            if (mine.stream, mine.category) != (other.stream, other.category) or (growth and in_layer):
                raise differ
            if growth:
                self.growth[same] = growth
            return
        a, b = self._small.freed(one), self._large.freed(same)
        further = b.layer - a.layer
        if a.part != b.part or further not in (0, 1):
            raise StreamError(f"{differ} that are allocated elsewhere")
        if further:
            self.from_end.add(same)
        # Of two layers, the second is the last one; of three, the third is.
        kind = 2 if a.layer and self._small.parts[a.part].order else a.layer
        if kind != b.layer:
            self._twins[_Place(b.part, kind, a.offset)] = b.offset
        elif a.offset != b.offset:
            raise StreamError(f"{differ} that are allocated elsewhere")


def _built(large: _Outline, rules: _Rules, layers: int) -> Stream:
    """The step with at least three layers."""
    builder = StreamBuilder()
    made: list[list[list[int]]] = []  # block numbers, by part, layer and place; -1 of frees
    names: dict[tuple[int, int], Moment] = {}
    stream = large.stream
    for part in large.parts:
        made.append([[] for _ in range(layers if part.order else 1)])
        for layer in range(layers)[:: part.order] if part.order else (0,):
            for index in part.blocks[_kind(layer, layers) if part.order else 0]:
                key = (layer, stream.moments[index])
                if key not in names:
                    moment = stream.moment(index)
                    names[key] = moment if moment.layer is None else moment._replace(layer=layer)
                code, block = stream.codes[index], -1
                if code >= 0:
                    size = stream.sizes[code] + rules.growth.get(index, 0) * (layers - 3)
                    category = CATEGORIES[stream.categories[code]]
                    block = builder.allocate(size, names[key], stream.streams[code], category)
                else:
                    place = _target(large, rules, index, layer if part.order else None, layers)
                    builder.free(made[place.part][place.layer][place.offset], names[key])
                made[-1][layer].append(block)
    return builder.done()


def _target(large: _Outline, rules: _Rules, index: int, layer: int | None, layers: int) -> _Place:
    """Where the block is that an event of three layers frees when it is done in a layer of many, or outside layers."""
    place = large.freed(index)
    if layer is not None and _kind(layer, layers) == _MIDDLE and large.parts[place.part].order:
        target = layer + place.layer - _MIDDLE
        offset = place.offset if _kind(target, layers) == place.layer else rules.twin(place)
        return _Place(place.part, target, offset)
    if index in rules.from_end:
        return _Place(place.part, place.layer + layers - 3, place.offset)
    return place


def _kind(layer: int, layers: int) -> int:
    """Which of three layers a layer is like."""
    return 0 if layer == 0 else 2 if layer == layers - 1 else _MIDDLE
