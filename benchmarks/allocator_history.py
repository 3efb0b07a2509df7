"""The history of a device's allocator, as torch records it, to compare with the modelled allocator.

torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)   # before anything is allocated
...
recording = from_snapshot(torch.cuda.memory._snapshot()["device_traces"][0])
recording.replayed(settings) == recording.reserved
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_mux.memory.caching.allocator import Allocator
from megatron_mux.memory.caching.blocks import Block
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.stream.events import StreamError

_GROWTH = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
# A block that is asked back may still be in use on another stream: it is free when that is completed.
_NOTHING = ("free_requested", "snapshot", "oom")


@dataclass(frozen=True)
class Recording:
    """What a device did.

    Attributes:
        events: Its allocations: their number, bytes and CUDA stream. And its frees, where a block could be used again:
            `~number`, and zeros.
        reserved: Bytes that the device had reserved after each event.
        addresses: Where `cudaMalloc` put the segments, one after the other.
        emptied: Indices of the events before which segments were released: by `empty_cache`, or because another one
            did not fit. The index after the last event is among them if that was at the end.
    """

    events: list[tuple[int, int, int]]
    reserved: array[int]
    addresses: tuple[int, ...]
    emptied: frozenset[int]

    def replayed(self, settings: Settings) -> array[int]:
        """Bytes that the modelled allocator has reserved after each event."""
        allocator, held = Allocator(settings, self.addresses), dict[int, Block]()
        reserved = array("q")
        for index, (code, size, stream) in enumerate(self.events):
            if index in self.emptied:
                allocator.empty_cache()
            if code < 0:
                allocator.free(held.pop(~code))
            else:
                held[code] = allocator.allocate(size, stream)
            reserved.append(allocator.reserved)
        return reserved


def from_snapshot(trace: Sequence[Mapping[str, Any]]) -> Recording:
    """Read one device's trace.

    Args:
        trace: `torch.cuda.memory._snapshot()["device_traces"][device]`, recorded from before the first allocation and
            with `max_entries` enough.

    Raises:
        StreamError: It frees what it has not allocated (the beginning is missing), has an action that is not known, or
            pools of CUDA graphs or `torch.cuda.MemPool`.
    """
    events: list[tuple[int, int, int]] = []
    live: dict[int, int] = {}
    addresses: list[int] = []
    emptied: set[int] = set()
    reserved, total, made = array("q"), 0, 0
    for place, entry in enumerate(trace):
        action = entry["action"]
        if action in _NOTHING:
            continue
        if tuple(entry.get("pool_id", (0, 0))) != (0, 0):
            raise StreamError(
                f"entry {place} of the trace ({action}) is of a pool of its own, which is not replayed"
            )
        if action in _GROWTH:
            total += _GROWTH[action] * entry["size"]
            if action == "segment_alloc":
                addresses.append(entry["addr"])
            elif _GROWTH[action] < 0:
                emptied.add(len(reserved))
            continue
        address: int = entry["addr"]
        if action == "alloc":
            if address in live:
                raise StreamError(
                    f"entry {place} of the trace allocates at {address:#x}, where a block is in use"
                )
            live[address] = made
            events.append((made, entry["size"], entry["stream"]))
            made += 1
        elif action == "free_completed":
            if address not in live:
                raise StreamError(
                    f"entry {place} of the trace frees {address:#x}, which it has not allocated: "
                    "record from before the first allocation, with max_entries enough"
                )
            events.append((~live.pop(address), 0, 0))
        else:
            raise StreamError(f"entry {place} of the trace has an action that is not known: {action!r}")
        reserved.append(total)
    return Recording(events, reserved, tuple(addresses), frozenset(emptied))
