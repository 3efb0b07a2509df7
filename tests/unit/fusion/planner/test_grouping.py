"""Balanced buckets, against every grouping there is."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.fusion.planner.grouping import balanced, numbers, runs
from tests.unit.fusion.planner.exhaustive import every_grouping, imbalance

latencies = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=7)


@given(latencies, st.integers(1, 7))
def test_every_hybrid_task_is_in_one_bucket_and_none_is_empty(values: list[float], buckets: int) -> None:
    buckets = min(buckets, len(values))
    grouping = balanced(values, buckets)
    assert sorted(i for bucket in grouping for i in bucket) == list(range(len(values)))
    assert len(grouping) == buckets and all(grouping)
    assert grouping == balanced(values, buckets)


@settings(max_examples=60, deadline=None)
@given(latencies)
def test_the_fullest_bucket_is_near_the_least_possible(values: list[float]) -> None:
    best: dict[int, float] = {}
    fullest: dict[int, float] = {}
    for grouping in every_grouping(len(values)):
        count = len(grouping)
        best[count] = min(best.get(count, math.inf), imbalance(values, grouping))
        most = max(sum(values[i] for i in bucket) for bucket in grouping)
        fullest[count] = min(fullest.get(count, math.inf), most)
    for count in best:
        found = balanced(values, count)
        assert imbalance(values, found) >= best[count] - 1e-9
        # Longest first comes within a third (Graham, 1969).
        assert max(sum(values[i] for i in bucket) for bucket in found) <= 4 / 3 * fullest[count] * (1 + 1e-9)


@given(st.integers(1, 3000))
def test_runs_are_of_any_length_and_few_for_each_task(count: int) -> None:
    starts, stops = runs(count)
    assert len(starts) <= max(1100, 4 * count) and len(set(zip(starts, stops, strict=True))) == len(starts)
    assert (
        set(stops) == set(range(1, count + 1)) and min(stops - starts) >= 1 and max(stops - starts) == count
    )
    assert numbers(count)[-1] == count and len(numbers(count)) <= 16 + 8 * math.log2(count)
    if count <= 44:
        assert len(starts) == count * (count + 1) // 2
