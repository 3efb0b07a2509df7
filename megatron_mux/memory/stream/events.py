"""What a step does to a device's memory: its allocations and frees, one after the other.

A stream is kept in columns, eight bytes an event and another seventeen a block: the 200,000 events of a step of eighty
layers are 3 MB. It is built by a `StreamBuilder`, and read as `Event`s or by column.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple

FORMAT = 1
"""Of the JSON. A file of another format is refused."""


class StreamError(ValueError):
    """A stream that cannot be: the message names the event."""


class Category(StrEnum):
    """What a block of memory is for."""

    PARAMETERS = "parameters"
    ADAPTERS = "adapters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    WORKSPACE = "workspace"
    COMMUNICATION = "communication"
    OTHER = "other"


CATEGORIES = tuple(Category)
_CODE_OF = {category: code for code, category in enumerate(CATEGORIES)}


class Moment(NamedTuple):
    """When something happens in a step.

    Attributes:
        phase: `forward`, `backward`, `optimizer`, or whatever the step is divided into.
        layer: Which layer it is done in or for; None outside layers.
        operator: What is running.
    """

    phase: str
    layer: int | None = None
    operator: str = ""

    def __str__(self) -> str:
        where = "outside layers" if self.layer is None else f"layer {self.layer}"
        return ", ".join(filter(None, (self.phase, where, self.operator)))


@dataclass(frozen=True, slots=True)
class Event:
    """One allocation or free. A free tells the size, stream and category of its block again.

    Attributes:
        kind: Which of the two.
        block: Blocks are numbered in the order in which they are allocated, from 0.
        size: Bytes asked for.
        stream: The CUDA stream that the block is allocated for.
        category: What the block is for.
        moment: When.
    """

    kind: Literal["allocate", "free"]
    block: int
    size: int
    stream: int
    category: Category
    moment: Moment


@dataclass(frozen=True)
class Peak:
    """The most that is live at once.

    Attributes:
        size: Bytes, as asked for: no rounding.
        index: The first event after which it is reached; -1 of a stream without one.
        moment: Of that event.
        breakdown: What these bytes are for; categories without any are left out.
    """

    size: int
    index: int
    moment: Moment | None
    breakdown: Mapping[Category, int]


@dataclass(frozen=True)
class Stream:
    """A step's events in columns. Make it with a `StreamBuilder`, `from_json` or `extended`.

    Attributes:
        codes: For each event the number of the block it allocates, or `~number` of the block it frees.
        moments: For each event an index of `moment_names`.
        sizes: Bytes of each block.
        streams: Each block's CUDA stream.
        categories: Each block's index of `CATEGORIES`.
        moment_names: All different moments, in the order of their first use.
    """

    codes: array[int]
    moments: array[int]
    sizes: array[int]
    streams: array[int]
    categories: array[int]
    moment_names: tuple[Moment, ...]

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[Event]:
        return (self[index] for index in range(len(self.codes)))

    def __getitem__(self, index: int) -> Event:
        code = self.codes[index]
        block = code if code >= 0 else ~code
        return Event(
            "allocate" if code >= 0 else "free",
            block,
            self.sizes[block],
            self.streams[block],
            CATEGORIES[self.categories[block]],
            self.moment(index),
        )

    def moment(self, index: int) -> Moment:
        """When an event happens."""
        return self.moment_names[self.moments[index]]

    def live(self) -> array[int]:
        """Bytes that are live after each event, as asked for."""
        found, size, sizes = array("q"), 0, self.sizes
        for code in self.codes:
            size += sizes[code] if code >= 0 else -sizes[~code]
            found.append(size)
        return found

    def peak(self) -> Peak:
        """The most that is live at once, when, and what it is."""
        live = self.live()
        if not live:
            return Peak(0, -1, None, {})
        size = max(live)
        index = live.index(size)
        return Peak(size, index, self.moment(index), self.breakdown(index))

    def breakdown(self, index: int) -> dict[Category, int]:
        """What the bytes are for that are live after an event; categories without any are left out."""
        totals = [0] * len(CATEGORIES)
        for code in self.codes[: index + 1]:
            block = code if code >= 0 else ~code
            totals[self.categories[block]] += self.sizes[block] if code >= 0 else -self.sizes[block]
        return {CATEGORIES[i]: total for i, total in enumerate(totals) if total}

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        return json.dumps(
            {
                "format": FORMAT,
                "codes": self.codes.tolist(),
                "moments": self.moments.tolist(),
                "sizes": self.sizes.tolist(),
                "streams": self.streams.tolist(),
                "categories": [CATEGORIES[code] for code in sorted(set(self.categories))],
                "category": _reindexed(self.categories),
                "moment_names": [list(moment) for moment in self.moment_names],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Stream:
        """Read what `to_json` wrote.

        Raises:
            StreamError: It is no such text, or its events cannot be.
        """
        try:
            return _read(json.loads(text))
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, StreamError):
                raise
            raise StreamError(f"this is no stream of allocations: {error!r}") from error


class StreamBuilder:
    """Collects the events of a step, and refuses those that cannot be where they are met."""

    def __init__(self) -> None:
        self._stream = Stream(array("i"), array("I"), array("q"), array("q"), array("B"), ())
        self._freed = bytearray()
        self._moments: dict[Moment, int] = {}

    def allocate(
        self, size: int, moment: Moment, stream: int = 0, category: Category = Category.OTHER
    ) -> int:
        """Add an allocation.

        Args:
            size: Bytes. A tensor without an element may be told too: it takes no memory.
            moment: When.
            stream: The CUDA stream it is for.
            category: What for.

        Returns:
            The block's number, to free it by.

        Raises:
            StreamError: The size is negative.
        """
        into = self._stream
        if size < 0:
            raise StreamError(f"event {len(into)} ({moment}) allocates {size} bytes")
        block = len(into.sizes)
        into.codes.append(block)
        into.moments.append(self._interned(moment))
        into.sizes.append(size)
        into.streams.append(stream)
        into.categories.append(_CODE_OF[category])
        self._freed.append(0)
        return block

    def free(self, block: int, moment: Moment) -> None:
        """Add a free.

        Raises:
            StreamError: There is no such block, or it is free already.
        """
        into = self._stream
        if not 0 <= block < len(into.sizes):
            raise StreamError(
                f"event {len(into)} ({moment}) frees block {block}, which nothing has allocated"
            )
        if self._freed[block]:
            raise StreamError(f"event {len(into)} ({moment}) frees block {block} a second time")
        self._freed[block] = 1
        into.codes.append(~block)
        into.moments.append(self._interned(moment))

    def done(self) -> Stream:
        """The stream of all events so far. What is added later is not part of it."""
        columns = self._stream
        return Stream(
            columns.codes[:],
            columns.moments[:],
            columns.sizes[:],
            columns.streams[:],
            columns.categories[:],
            tuple(self._moments),
        )

    def _interned(self, moment: Moment) -> int:
        return self._moments.setdefault(moment, len(self._moments))


def _reindexed(codes: Sequence[int]) -> list[int]:
    """Each code's place among those that occur: categories may be added to the list later."""
    places = {code: place for place, code in enumerate(sorted(set(codes)))}
    return [places[code] for code in codes]


def _read(data: Mapping[str, Any]) -> Stream:
    """A stream from its JSON, event by event.

    Raises:
        StreamError: Some event cannot be; or the format is another one.
        KeyError, IndexError, TypeError, ValueError, OverflowError: A column is missing or holds something else.
    """
    if data["format"] != FORMAT:
        raise StreamError(f"this stream is of format {data['format']}, not {FORMAT}")
    moments = [Moment(*names) for names in data["moment_names"]]
    categories = [Category(name) for name in data["categories"]]
    if not len(data["sizes"]) == len(data["streams"]) == len(data["category"]):
        raise StreamError("the columns of the blocks differ in length")
    builder = StreamBuilder()
    for code, at in zip(data["codes"], data["moments"], strict=True):
        if code < 0:
            builder.free(~code, moments[at])
            continue
        block = builder.allocate(
            data["sizes"][code], moments[at], data["streams"][code], categories[data["category"][code]]
        )
        if block != code:
            raise StreamError(f"block {code} is allocated where block {block} should be ({moments[at]})")
    stream = builder.done()
    if len(stream.sizes) != len(data["sizes"]):
        raise StreamError(f"of {len(data['sizes'])} blocks, {len(stream.sizes)} are allocated")
    return stream
