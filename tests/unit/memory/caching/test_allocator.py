"""The replayed allocator: its rules worked out by hand, and what always holds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.memory.caching.allocator import Allocator
from megatron_mux.memory.caching.blocks import Block
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.sizes import MIB
from tests.unit.memory.caching.segments import segments

KIB = 1024
EXPANDABLE = Settings(expandable_segments=True)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_of_equal_blocks_the_lowest_address() -> None:
    """The device put the second segment below the first."""
    allocator = Allocator(addresses=[1 << 40, 1 << 30])
    blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
    assert [block.address for block in blocks[:2]] == [1 << 40, 1 << 30]
    assert blocks[2].address >= (1 << 40) + 30 * MIB
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(30 * MIB).address == 1 << 30


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
    assert allocator.reserved == (64 + 40 + 16) * MIB
    allocator.allocate(90 * MIB)  # none is that large: 64 and 40 go
    assert allocator.reserved == (16 + 90) * MIB


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
