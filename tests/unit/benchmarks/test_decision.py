from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.decision import Layout, layouts, select

CDP, ADP, TP, BOTH = layouts(4)


def test_names_and_order() -> None:
    assert [(layout.name, layout.kind) for layout in layouts(4)] == [
        ("4DP", "CDP"),
        ("4DP", "ADP"),
        ("4TP", "TP"),
        ("2DP+2TP", "DP+TP"),
    ]
    assert [layout.name for layout in layouts(8)][3:] == ["4DP+2TP", "2DP+4TP"]
    assert [layout.name for layout in layouts(2)] == ["2DP", "2DP", "2TP"]
    assert [layout.name for layout in layouts(1)] == ["1DP"]


@given(st.integers(1, 200))
def test_every_layout_takes_all_gpus(gpus: int) -> None:
    found = layouts(gpus)
    assert all(layout.gpus == gpus for layout in found) and len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("batches", "chosen"),
    [
        ((1, 1, 1, 1), CDP),  # 6, 4, 1, 2
        ((2, 3, 12, 6), CDP),  # all 12: conventional data parallelism comes first
        ((1, 2, 3, 4), ADP),  # 6, 8, 3, 8: before the combination
        ((0, 0, 4, 2), TP),  # 4 each: before the combination
        ((0, 0, 3, 2), BOTH),
        ((0, 0, 0, 1), BOTH),
        ((0, 0, 0, 0), None),
    ],
)
def test_scores_and_ties(batches: tuple[int, ...], chosen: Layout | None) -> None:
    assert select(list(zip(layouts(4), batches, strict=True))) == chosen
