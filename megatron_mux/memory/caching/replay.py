"""Replays a stream of allocations and frees through the allocator."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from megatron_mux.memory.caching.allocator import Allocator, OutOfMemory
from megatron_mux.memory.caching.blocks import Block
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.stream.events import Moment, Stream


@dataclass(frozen=True)
class Replay:
    """The allocator's memory over a stream.

    Attributes:
        allocated: Bytes in use after each event, rounded as the allocator does.
        reserved: Bytes reserved from the device after each event.
        out_of_memory: Index of the allocation that failed, at which the replay ends; None if all succeeded.
    """

    stream: Stream
    allocated: array[int]
    reserved: array[int]
    out_of_memory: int | None

    @property
    def peak_allocated(self) -> int:
        """Peak of bytes in use."""
        return max(self.allocated, default=0)

    @property
    def peak_reserved(self) -> int:
        """Peak of reserved bytes."""
        return max(self.reserved, default=0)

    @property
    def peak_allocated_at(self) -> int:
        """Index of the event that first reaches `peak_allocated`; -1 without events."""
        return self.allocated.index(self.peak_allocated) if self.allocated else -1

    @property
    def peak_allocated_moment(self) -> Moment | None:
        """Moment of that event."""
        return self.stream.moment(self.peak_allocated_at) if self.allocated else None


def replay(stream: Stream, settings: Settings | None = None) -> Replay:
    """Replay a stream on an empty allocator.

    Args:
        stream: Allocations and frees. Allocations of no bytes do not reach the allocator.
    """
    allocator = Allocator(settings)
    allocated, reserved = array("q"), array("q")
    held: dict[int, Block] = {}
    sizes, failed = stream.sizes, None
    for index, code in enumerate(stream.codes):
        if code < 0:
            block = held.pop(~code, None)
            if block is not None:
                allocator.free(block)
        elif sizes[code]:
            try:
                held[code] = allocator.allocate(sizes[code])
            except OutOfMemory:
                failed = index
                break
        allocated.append(allocator.allocated)
        reserved.append(allocator.reserved)
    return Replay(stream, allocated, reserved, failed)
