"""The replayed allocator: its rules worked out by hand, and what always holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.memory.caching.allocator import Allocator, OutOfMemory
from megatron_mux.memory.caching.blocks import Block
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.sizes import MIB
from tests.unit.memory.caching.segments import segments

KIB = 1024
EXPANDABLE = Settings(expandable_segments=True)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_sizes_are_multiples_of_512() -> None:
    allocator = Allocator()
    assert [allocator.allocate(size).size for size in (1, 511, 512, 513, 1000)] == [512, 512, 512, 1024, 1024]
    assert (allocator.allocated, allocator.reserved) == (3584, 2 * MIB)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded to 10 MiB: a segment of its own
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (41 * MIB, 42 * MIB),
    ],
)
def test_what_a_miss_asks_the_device_for(size: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(size)
    assert allocator.reserved == segment


def test_small_requests_share_a_segment() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(512 * KIB) for _ in range(4)]
    assert allocator.reserved == 2 * MIB
    assert [block.address - blocks[0].address for block in blocks] == [0, 512 * KIB, MIB, MIB + 512 * KIB]
    allocator.allocate(1)  # nothing is left: a second segment
    assert allocator.reserved == 4 * MIB


def test_the_smallest_block_that_is_large_enough() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(size * MIB) for size in (5, 2, 3, 2, 4, 2)]  # 18 of 20 MiB: 2 are left
    for index in (0, 2, 4):
        allocator.free(blocks[index])  # holes of 5, 3 and 4 MiB; the last one is next to no free block
    assert allocator.allocate(3 * MIB - 512).address == blocks[2].address
    assert allocator.allocate(4 * MIB).address == blocks[4].address
    assert allocator.allocate(3 * MIB).address == blocks[0].address  # 5 MiB are left, 2 of them free again
    assert allocator.allocate(2 * MIB).address == blocks[0].address + 3 * MIB  # before the 2 MiB at the end
    assert allocator.reserved == 20 * MIB


def test_a_large_block_keeps_what_is_left_over_up_to_a_mebibyte() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(12 * MIB))
    whole = allocator.allocate(11 * MIB)  # exactly 1 MiB over: not split
    assert (whole.size, allocator.allocated) == (12 * MIB, 12 * MIB)
    allocator.free(whole)
    part = allocator.allocate(11 * MIB - 512)  # 512 bytes more: split
    assert (part.size, allocator.allocated) == (11 * MIB - 512, 11 * MIB - 512)
    assert allocator.allocate(MIB + 512).address == part.address + part.size
    assert allocator.reserved == 12 * MIB


def test_free_neighbours_become_one() -> None:
    allocator = Allocator()
    first, middle, last = (allocator.allocate(600 * KIB) for _ in range(3))
    allocator.free(first)
    allocator.free(last)  # and the 248 KiB behind it
    allocator.allocate(MIB)  # neither hole is large enough
    assert allocator.reserved == 4 * MIB
    allocator.free(middle)
    assert segments(allocator, [])[0].blocks == ((2 * MIB, False),)


def test_streams_do_not_share() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(MIB, stream=0))
    allocator.allocate(MIB, stream=1)
    assert allocator.reserved == 4 * MIB
    allocator.allocate(MIB, stream=0)
    assert allocator.reserved == 4 * MIB


def test_of_equal_blocks_the_lowest_address() -> None:
    """The device put the second segment below the first."""
    allocator = Allocator(addresses=[1 << 40, 1 << 30])
    blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
    assert [block.address for block in blocks[:2]] == [1 << 40, 1 << 30]
    assert blocks[2].address >= (1 << 40) + 30 * MIB
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(30 * MIB).address == 1 << 30


def test_free_segments_are_returned_before_memory_runs_out() -> None:
    allocator = Allocator(Settings(capacity=36 * MIB))
    kept = allocator.allocate(10 * MIB)
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(100)
    assert (allocator.reserved, allocator.retries) == (24 * MIB, 0)
    allocator.allocate(14 * MIB)  # 38 MiB would be too many: the free 12 go
    assert (allocator.reserved, allocator.retries) == (26 * MIB, 1)
    with pytest.raises(OutOfMemory, match=f"no memory for {12 * MIB} bytes, with {26 * MIB} reserved"):
        allocator.allocate(12 * MIB)
    allocator.free(kept)
    allocator.allocate(12 * MIB)  # 28 + 10 - 10
    assert (allocator.reserved, allocator.retries) == (28 * MIB, 3)


def test_empty_cache_returns_what_is_free_as_a_whole() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(size) for size in (100, 200, 5 * MIB, 30 * MIB)]
    allocator.free(blocks[0])
    allocator.free(blocks[3])
    allocator.empty_cache()
    assert allocator.reserved == 22 * MIB  # the others have a block in use
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_expandable_segments_grow_by_what_is_missing() -> None:
    allocator = Allocator(EXPANDABLE)
    first = allocator.allocate(3 * MIB)  # one page of 20 MiB
    assert allocator.reserved == 20 * MIB
    second = allocator.allocate(18 * MIB)  # 17 MiB at the end, and one page more
    assert (second.address, second.size) == (first.address + 3 * MIB, 18 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(100)  # the small pool has pages of 2 MiB
    assert allocator.reserved == 42 * MIB


def test_expandable_segments_are_split_to_the_last_512_bytes() -> None:
    allocator = Allocator(EXPANDABLE)
    first = allocator.allocate(20 * MIB - 512)
    assert first.size == 20 * MIB - 512
    assert [segment.blocks for segment in segments(allocator, [first])] == [
        ((20 * MIB - 512, True), (512, False))
    ]


def test_pages_that_are_free_as_a_whole_are_returned_and_filled_again() -> None:
    allocator = Allocator(EXPANDABLE)
    first = allocator.allocate(30 * MIB)  # pages 0 and 1
    second = allocator.allocate(5 * MIB)
    allocator.free(first)
    allocator.empty_cache()  # page 0 goes, 10 MiB of page 1 stay beside the 5 in use and the 5 at the end
    assert allocator.reserved == 20 * MIB
    assert [segment.blocks for segment in segments(allocator, [second])] == [
        ((10 * MIB, False), (5 * MIB, True), (5 * MIB, False))
    ]
    again = allocator.allocate(25 * MIB)  # the lowest addresses that are enough: page 0 and what follows
    assert (again.address, allocator.reserved) == (first.address, 40 * MIB)
    allocator.free(second)
    allocator.free(again)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_another_block_is_taken_before_one_that_can_grow() -> None:
    allocator = Allocator(EXPANDABLE)
    hole, _, grows = (allocator.allocate(size * MIB) for size in (8, 5, 7))
    allocator.free(hole)
    allocator.free(grows)  # 7 MiB at the end of the first page: the better fit, but it can grow
    assert allocator.allocate(6 * MIB).address == hole.address


def test_blocks_too_large_to_be_split() -> None:
    allocator = Allocator(Settings(max_split_size=32 * MIB))
    allocator.free(allocator.allocate(64 * MIB))
    large = allocator.allocate(45 * MIB)  # 64 is less than 45 + 20: used, and kept whole
    assert (large.size, allocator.reserved) == (64 * MIB, 64 * MIB)
    allocator.free(large)
    allocator.allocate(44 * MIB)  # 64 is as much as 44 + 20: not used
    allocator.allocate(16 * MIB)  # nor for a request that may be split
    assert allocator.reserved == (64 + 44 + 16) * MIB


def test_a_block_too_large_to_be_split_is_returned_first() -> None:
    allocator = Allocator(Settings(max_split_size=32 * MIB, capacity=150 * MIB))
    for block in [allocator.allocate(size * MIB) for size in (64, 40, 36)]:
        allocator.free(block)
    allocator.allocate(16 * MIB)  # 36 is the first of at least 32: it goes, and that is enough
    assert (allocator.reserved, allocator.retries) == ((64 + 40 + 16) * MIB, 0)
    allocator.allocate(90 * MIB)  # none is that large: 64 and 40 go
    assert (allocator.reserved, allocator.retries) == ((16 + 90) * MIB, 0)


# --- rules -----------------------------------------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, MIB),
    st.integers(1, 30).map(lambda count: count * 512 * KIB),
    st.integers(MIB, 50 * MIB),
)
SOME_SETTINGS = st.sampled_from(
    [
        Settings(),
        EXPANDABLE,
        Settings(max_split_size=24 * MIB),
        Settings(roundup_power2_divisions=4),
        Settings(large_segment=12 * MIB, expandable_segments=True),
    ]
)


@settings(max_examples=150, deadline=None)
@given(SOME_SETTINGS, st.lists(st.tuples(st.integers(0, 1), SIZES, st.integers(0, 99)), max_size=60))
def test_rules_that_always_hold(chosen: Settings, steps: list[tuple[int, int, int]]) -> None:
    allocator, twin = Allocator(chosen), Allocator(chosen)
    used: list[tuple[Block, Block]] = []
    for stream, size, which in steps:
        if which % 2 and used:
            one, other = used.pop(which % len(used))
            allocator.free(one)
            twin.free(other)
        else:
            used.append((allocator.allocate(size, stream), twin.allocate(size, stream)))
            assert used[-1][0].address == used[-1][1].address  # nothing is left to chance
            assert used[-1][0].size >= size
        held = sorted((block for block, _ in used), key=lambda block: block.address)
        assert all(block.address % 512 == 0 and block.size % 512 == 0 for block in held)
        assert all(a.address + a.size <= b.address for a, b in pairwise(held))
        assert allocator.allocated == sum(block.size for block in held) <= allocator.reserved
        reserved = segments(allocator, held)
        assert allocator.reserved == sum(segment.size for segment in reserved)
        assert all(a[1] or b[1] for segment in reserved for a, b in pairwise(segment.blocks))
    for one, _ in used:
        allocator.free(one)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.tuples(st.just(Settings()), st.lists(st.integers(1, MIB), max_size=30)),
        st.tuples(st.just(Settings()), st.lists(st.integers(10 * MIB, 80 * MIB), max_size=30)),
        st.tuples(st.just(EXPANDABLE), st.lists(SIZES, max_size=30)),
    )
)
def test_the_same_step_again_reserves_nothing_new(case: tuple[Settings, list[int]]) -> None:
    """If nothing is freed before its end, and a pool's requests are all small, or all have segments of their own."""
    chosen, sizes = case
    allocator = Allocator(chosen)
    reserved = set()
    for _ in range(3):
        for block in [allocator.allocate(size) for size in sizes]:
            allocator.free(block)
        reserved.add(allocator.reserved)
    assert len(reserved) == 1
