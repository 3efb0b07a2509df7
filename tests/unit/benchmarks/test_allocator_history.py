"""A device's trace, written by hand, read and replayed: the same bytes reserved after every event."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.allocator_history import from_snapshot
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.stream.events import StreamError

SMALL, FIRST, SECOND, THIRD = 0x7F00_0000_0000, 0x7F20_0000_0000, 0x7F10_0000_0000, 0x7F30_0000_0000


def entry(action: str, addr: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 1, "pool_id": (0, 0)}


def freed(addr: int, size: int) -> list[dict[str, Any]]:
    return [entry("free_requested", addr, size), entry("free_completed", addr, size)]


# What torch does with: a 1000-byte tensor; 4 and 18 MiB, which need a segment of 20 and one of 18 MiB, the latter at
# the lower address; everything freed but the small one; empty_cache; 30 MiB; an allocation that fails; a snapshot.
TRACE = [
    entry("segment_alloc", SMALL, 2 * MIB),
    entry("alloc", SMALL, 1000),
    entry("segment_alloc", FIRST, 20 * MIB),
    entry("alloc", FIRST, 4 * MIB),
    entry("segment_alloc", SECOND, 18 * MIB),
    entry("alloc", SECOND, 18 * MIB),  # 16 MiB are left in the first
    *freed(FIRST, 4 * MIB),
    entry("alloc", FIRST, 19 * MIB),  # all 20: 1 MiB is not split off
    entry("free_requested", SECOND, 18 * MIB),  # used on another stream: not to be used again yet
    entry("segment_alloc", THIRD, 18 * MIB),
    entry("alloc", THIRD, 18 * MIB),
    entry("free_completed", SECOND, 18 * MIB),
    *freed(FIRST, 19 * MIB),
    entry("segment_free", SECOND, 18 * MIB),
    entry("segment_free", FIRST, 20 * MIB),
    entry("segment_alloc", FIRST, 30 * MIB),
    entry("alloc", FIRST, 30 * MIB),
    {"action": "oom", "size": 99 * MIB, "stream": 0, "device_free": 5, "pool_id": (0, 0)},
    *freed(THIRD, 18 * MIB),
    entry("snapshot", 0, 0),
    entry("segment_free", THIRD, 18 * MIB),
]


def test_a_golden_history() -> None:
    recording = from_snapshot(TRACE)
    assert [(event.kind[0], event.block, event.size) for event in recording.stream] == [
        ("a", 0, 1000), ("a", 1, 4 * MIB), ("a", 2, 18 * MIB), ("f", 1, 4 * MIB), ("a", 3, 19 * MIB),
        ("a", 4, 18 * MIB), ("f", 2, 18 * MIB), ("f", 3, 19 * MIB), ("a", 5, 30 * MIB), ("f", 4, 18 * MIB),
    ]  # fmt: skip
    assert [size // MIB for size in recording.reserved] == [2, 22, 40, 40, 40, 58, 58, 58, 50, 50]
    assert recording.addresses == (SMALL, FIRST, SECOND, THIRD, FIRST)
    assert recording.emptied == {8, 10}
    assert recording.replayed(Settings()) == recording.reserved


def test_a_golden_history_of_expandable_segments() -> None:
    base = 0x7F40_0000_0000
    recording = from_snapshot(
        [
            entry("segment_map", base, 20 * MIB),
            entry("alloc", base, 3 * MIB),
            entry("segment_map", base + 20 * MIB, 20 * MIB),
            entry("alloc", base + 3 * MIB, 18 * MIB),
            *freed(base + 3 * MIB, 18 * MIB),
            entry("segment_unmap", base + 20 * MIB, 20 * MIB),  # empty_cache
            entry("alloc", base + 3 * MIB, 17 * MIB),
            *freed(base, 3 * MIB),
        ]
    )
    assert [size // MIB for size in recording.reserved] == [20, 40, 40, 20, 20]
    assert recording.addresses == ()
    assert recording.replayed(Settings(expandable_segments=True)) == recording.reserved


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (freed(FIRST, 5), "entry 1 of the trace frees 0x7f2000000000, which it has not allocated"),
        (
            [entry("alloc", FIRST, 5)] * 2,
            "entry 1 of the trace allocates at 0x7f2000000000, where a block is in use",
        ),
        ([entry("defragment", FIRST, 5)], "entry 0 .* not known: 'defragment'"),
        (
            [entry("alloc", FIRST, 5) | {"pool_id": (0, 3)}],
            r"entry 0 of the trace \(alloc\) is of a pool of its own",
        ),
    ],
)
def test_traces_that_cannot_be_read(trace: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(StreamError, match=said):
        from_snapshot(trace)
