"""A step as a stream of allocations and frees of a device's memory.

A stream is stored in columns, with eight bytes for an event and another nine for a block: the 200,000 events of a step
of eighty layers take 3 MB. A `StreamBuilder` builds it; it is read as `Event`s or by column. All blocks belong to one
CUDA stream.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple


class StreamError(ValueError):
    """An invalid stream; the message names the event."""


class Category(StrEnum):
    """Purpose of a block of memory."""

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
_COLUMNS = ("codes", "moments", "sizes", "categories")


class Moment(NamedTuple):
    """The time of an event in a step.

    Attributes:
        phase: `forward`, `backward`, `optimizer` or another phase of the step.
    """

    phase: str
    layer: int | None = None
    operator: str = ""

    def __str__(self) -> str:
        where = "outside layers" if self.layer is None else f"layer {self.layer}"
        return ", ".join(filter(None, (self.phase, where, self.operator)))


@dataclass(frozen=True, slots=True)
class Event:
    """One allocation or free. A free repeats the size and category of its block.

    Attributes:
        block: Number of the block, in the order of allocation, from 0.
        size: Requested bytes.
    """

    kind: Literal["allocate", "free"]
    block: int
    size: int
    category: Category
    moment: Moment


@dataclass(frozen=True)
class Stream:
    """The events of a step in columns. Make it with a `StreamBuilder`, `from_json` or `extended`.

    Attributes:
        codes: For each event the number of the block it allocates, or `~number` of the block it frees.
        moments: For each event an index into `moment_names`.
        sizes: Bytes of each block.
        categories: Each block's index into `CATEGORIES`.
        moment_names: All different moments, in the order of their first use.
    """

    codes: array[int]
    moments: array[int]
    sizes: array[int]
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
            CATEGORIES[self.categories[block]],
            self.moment(index),
        )

    def moment(self, index: int) -> Moment:
        """Time of an event."""
        return self.moment_names[self.moments[index]]

    def live(self) -> array[int]:
        """Requested bytes that are live after each event."""
        found, size, sizes = array("q"), 0, self.sizes
        for code in self.codes:
            size += sizes[code] if code >= 0 else -sizes[~code]
            found.append(size)
        return found

    def breakdown(self, index: int) -> dict[Category, int]:
        """Bytes that are live after an event, by category; categories without any are left out."""
        totals = [0] * len(CATEGORIES)
        for code in self.codes[: index + 1]:
            block = code if code >= 0 else ~code
            totals[self.categories[block]] += self.sizes[block] if code >= 0 else -self.sizes[block]
        return {CATEGORIES[i]: total for i, total in enumerate(totals) if total}

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        columns = {name: getattr(self, name).tolist() for name in _COLUMNS}
        return json.dumps({**columns, "moment_names": self.moment_names}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Stream:
        """Read what `to_json` wrote, by the same version of this package."""
        data = json.loads(text)
        found = cls.empty(tuple(Moment(*names) for names in data["moment_names"]))
        for name in _COLUMNS:
            getattr(found, name).extend(data[name])
        return found

    @classmethod
    def empty(cls, moment_names: tuple[Moment, ...] = ()) -> Stream:
        """A stream without events."""
        return cls(array("i"), array("I"), array("q"), array("B"), moment_names)


class StreamBuilder:
    """Collects the events of a step and refuses invalid ones."""

    def __init__(self) -> None:
        self._stream = Stream.empty()
        self._freed = bytearray()
        self._moments: dict[Moment, int] = {}

    def allocate(self, size: int, moment: Moment, category: Category = Category.OTHER) -> int:
        """Add an allocation.

        Args:
            size: Bytes; 0 for a tensor without elements.

        Returns:
            Number of the block, by which `free` knows it.

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
        into.categories.append(_CODE_OF[category])
        self._freed.append(0)
        return block

    def free(self, block: int, moment: Moment) -> None:
        """Add a free.

        Raises:
            StreamError: There is no such block, or it has been freed already.
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
        """The stream of all events so far; later events do not change it."""
        columns = {name: getattr(self._stream, name)[:] for name in _COLUMNS}
        return Stream(**columns, moment_names=tuple(self._moments))

    def _interned(self, moment: Moment) -> int:
        return self._moments.setdefault(moment, len(self._moments))
