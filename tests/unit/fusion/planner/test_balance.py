"""Layers are assigned to stages by cost: held against every way to cut."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.fusion.planner.balance import least_maximum


def every_cut(weights: list[float], parts: int) -> list[list[float]]:
    """Sums of the parts of every cut."""
    found = []
    for cuts in combinations(range(1, len(weights)), parts - 1):
        ends = [0, *cuts, len(weights)]
        found.append([sum(weights[a:b]) for a, b in zip(ends, ends[1:], strict=False)])
    return found


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_lighter_heaviest_part(weights: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    split = least_maximum(weights, parts)
    assert len(split) == parts and min(split) >= 1 and sum(split) == len(weights)
    ends = [sum(split[:i]) for i in range(parts + 1)]
    own = [sum(weights[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    cuts = every_cut(weights, parts)
    least = min(max(cut) for cut in cuts)
    assert max(own) == pytest.approx(least, abs=1e-9)
    even = min(sum(w * w for w in cut) for cut in cuts if max(cut) <= least + 1e-9)
    assert sum(w * w for w in own) == pytest.approx(even, abs=1e-6)


def test_a_head_like_ten_layers_takes_the_place_of_ten() -> None:
    weights = [1.0] * 29 + [11.0]  # SmolLM2's thirty layers, its loss head over all tokens
    assert least_maximum(weights, 2) == (20, 10)
    assert sorted(least_maximum(weights, 4)) == [1, 9, 10, 10] and least_maximum(weights, 4)[-1] == 1
