"""A stream of allocations and frees replayed through the allocator: what is allocated and reserved, and when."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megatron_mux.memory.caching.allocator import Allocator, OutOfMemory, Segment
from megatron_mux.memory.caching.blocks import Block
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.stream.events import Moment, Stream


@dataclass(frozen=True)
class Replay:
    """What a stream does to the allocator's memory.

    Attributes:
        stream: What was replayed.
        allocated: Bytes in use after each event, rounded as the allocator does.
        reserved: Bytes from the device after each event.
        out_of_memory: Index of the allocation there was no memory for; it and what comes after are left out. None if
            all went well.
        retries: How often free segments had to be returned to the device to have another one.
        settings, addresses, emptied: As for `replay`.
    """

    stream: Stream
    allocated: array[int]
    reserved: array[int]
    out_of_memory: int | None
    retries: int
    settings: Settings
    addresses: tuple[int, ...]
    emptied: frozenset[int]

    @property
    def peak_allocated(self) -> int:
        """The most bytes in use."""
        return max(self.allocated, default=0)

    @property
    def peak_reserved(self) -> int:
        """The most bytes from the device."""
        return max(self.reserved, default=0)

    @property
    def peak_allocated_at(self) -> int:
        """Index of the first event after which most bytes are in use; -1 without events."""
        return self.allocated.index(self.peak_allocated) if self.allocated else -1

    @property
    def peak_reserved_at(self) -> int:
        """Index of the first event after which most bytes are reserved; -1 without events."""
        return self.reserved.index(self.peak_reserved) if self.reserved else -1

    @property
    def peak_allocated_moment(self) -> Moment | None:
        """When most bytes are in use."""
        return self.stream.moment(self.peak_allocated_at) if self.allocated else None

    @property
    def peak_reserved_moment(self) -> Moment | None:
        """When most bytes are reserved."""
        return self.stream.moment(self.peak_reserved_at) if self.reserved else None

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that nobody uses when first most are reserved."""
        if not self.peak_reserved:
            return 0.0
        return 1 - self.allocated[self.peak_reserved_at] / self.peak_reserved

    def segments(self, index: int | None = None) -> list[Segment]:
        """Memory from the device after an event, by address; by default when first most is reserved."""
        last = self.peak_reserved_at if index is None else index
        allocator, held, _, _ = _run(self.stream, last + 1, self.settings, self.addresses, self.emptied)
        return allocator.segments(held.values())


def replay(
    stream: Stream,
    settings: Settings | None = None,
    addresses: Iterable[int] = (),
    emptied: Collection[int] = (),
) -> Replay:
    """Replay a stream on an allocator that has nothing yet.

    Args:
        stream: Allocations and frees. Those of no bytes ask the allocator for nothing.
        settings: The allocator's options, and how much memory there is.
        addresses: Where the device puts the segments, if it is known.
        emptied: Indices of the events before which `torch.cuda.empty_cache` is called.
    """
    chosen, places, before = settings or Settings(), tuple(addresses), frozenset(emptied)
    allocator, _, allocated, reserved = _run(stream, len(stream), chosen, places, before)
    failed = len(reserved) if len(reserved) < len(stream) else None
    return Replay(stream, allocated, reserved, failed, allocator.retries, chosen, places, before)


def _run(
    stream: Stream, count: int, settings: Settings, addresses: tuple[int, ...], emptied: frozenset[int]
) -> tuple[Allocator, dict[int, Block], array[int], array[int]]:
    """The first events of a stream, up to one there is no memory for.

    Returns:
        The allocator, the blocks in use, and bytes allocated and reserved after each event.
    """
    allocator = Allocator(settings, addresses)
    allocated, reserved = array("q"), array("q")
    held: dict[int, Block] = {}
    sizes, streams = stream.sizes, stream.streams
    for index, code in enumerate(stream.codes[:count]):
        if index in emptied:
            allocator.empty_cache()
        if code < 0:
            block = held.pop(~code, None)
            if block is not None:
                allocator.free(block)
        elif sizes[code]:
            try:
                held[code] = allocator.allocate(sizes[code], streams[code])
            except OutOfMemory:
                break
        allocated.append(allocator.allocated)
        reserved.append(allocator.reserved)
    return allocator, held, allocated, reserved
