from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.chunks import ChunkSearch, wasted

SMALL = ChunkSearch(least=32, width=64, step=8)


def plain_waste(counts: list[int], size: int) -> int:
    """By laying the parameters out."""
    chunks: list[int] = []
    for count in counts:
        if not chunks or chunks[-1] + count > size:
            chunks.append(0)
        chunks[-1] += count
    return len(chunks) * size - sum(counts)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_waste_is_what_laying_out_leaves(counts: list[int]) -> None:
    sizes = np.arange(40, 200, 8)
    assert wasted(counts, sizes).tolist() == [plain_waste(counts, int(size)) for size in sizes]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30))
def test_the_smallest_of_the_best(counts: list[int]) -> None:
    best = SMALL.best(counts)
    if sum(counts) <= SMALL.least:
        assert best == sum(counts)
        return
    first = -(-max(32, *counts) // 8) * 8
    tried = range(first, first + 65, 8)
    assert best == min(tried, key=lambda size: (plain_waste(counts, size), size))


def test_by_hand() -> None:
    # 40 + 40 leave nothing of 80; of 40, too, and that is smaller.
    assert SMALL.best([40, 40, 40, 40]) == 40
    # 24 + 24 fit into 48, a third 24 into the next with 24 of waste; three fit into 72 with none.
    assert SMALL.best([24, 24, 24]) == 72
    assert ChunkSearch().best([5, 6]) == 11
    assert ChunkSearch().best([]) == 1
