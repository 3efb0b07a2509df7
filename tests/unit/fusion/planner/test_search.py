"""Plans found against plans that exist."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.fusion.planner import arrangement as arrangement_module
from megatron_mux.fusion.planner.grouping import consecutive
from megatron_mux.fusion.planner.search import search
from megatron_mux.pipeline.bucket import BucketCost, Sizes
from megatron_mux.pipeline.structured import StructuredRun
from tests.unit.fusion.planner.exhaustive import exhaustive, plain_equation_6
from tests.unit.fusion.planner.synthetic import synthetic

COUNTS = (1, 2, 4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(COUNTS))
def test_equation_6_is_the_best_of_its_kind(seed: int, count: int) -> None:
    model = synthetic(seed)
    order = sorted(range(len(model.tokens)), key=lambda i: model.tokens[i])
    best: dict[int, float] = {}
    for cuts in range(2 ** (len(order) - 1)):
        runs: list[list[int]] = [[order[0]]]
        for i, task in enumerate(order[1:]):
            runs.append([task]) if cuts >> i & 1 else runs[-1].append(task)
        costs = [model.hybrid(tuple(sorted(run)), count) for run in runs]
        value = sum(costs[0].alone()[:-1]) + sum(count * max(cost.alone()) for cost in costs)
        best[len(runs)] = min(best.get(len(runs), math.inf), value)
    found = consecutive(model, order, count)
    assert [len(partition) for _, partition in found] == sorted(best)
    assert [value for value, _ in found] == pytest.approx([best[n] for n in sorted(best)])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(1.0, 4.0))
def test_a_plan_covers_each_task_once_and_keeps_to_memory(seed: int, room: float) -> None:
    model = synthetic(seed, tasks=1 + seed % 6)
    limit = [room * max(model.tokens)] * len(model.weights)
    found = search(model, model.tokens, COUNTS, limit)
    assert found is not None
    assert sorted(t for bucket in found.buckets for hybrid in bucket for t in hybrid) == list(
        range(len(model.tokens))
    )
    for bucket in found.buckets:
        kept = sum(model.tokens[t] for hybrid in bucket for t in hybrid) / found.micro_batches
        assert kept <= limit[0] * (1 + 1e-9)
    assert found == search(model, model.tokens, COUNTS, limit), "the same plan every time"


def test_there_is_no_arrangement_of_what_cannot_fit() -> None:
    model = synthetic(5, tasks=3)
    largest = max(range(3), key=lambda t: model.tokens[t])
    limit = [model.tokens[largest] / 4 * 0.99] * len(model.weights)
    assert search(model, model.tokens, COUNTS, limit) is None
    assert search(model, model.tokens, (8,), limit) is not None


@pytest.mark.parametrize("steps", [1, 8])
def test_close_to_the_best_of_all_arrangements(steps: int) -> None:
    gaps, plain = [], []
    for seed in range(16):
        model = synthetic(seed, tasks=1 + seed % 5, stages=1 + seed % 3)
        arrangement = search(model, model.tokens, COUNTS, steps=steps)
        assert arrangement is not None
        found = arrangement.latency
        best = exhaustive(model, len(model.tokens), COUNTS, steps=steps, below=found, tolerance=1e-3)
        least = found if best is None else best.latency
        gaps.append(found / least - 1)
        plain.append(plain_equation_6(model, model.tokens, COUNTS, steps=steps).latency / least - 1)
    assert statistics.median(gaps) <= 0.01 and max(gaps) <= 0.05
    assert statistics.mean(plain) > statistics.mean(gaps), "evaluating whole plans is worth its time"


def test_many_tasks_are_planned_with_bounded_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a bound this one simulates some five million passes.
    passes = 0

    def counted(buckets: list[BucketCost], limit: None, sizes: Sizes, virtual: int) -> StructuredRun:
        nonlocal passes
        passes += 2 * buckets[0].stages * sum(map(sum, sizes))
        return StructuredRun(buckets, limit, sizes, virtual)

    monkeypatch.setattr(arrangement_module, "StructuredRun", counted)
    model = synthetic(1, tasks=64, stages=8)
    found = search(model, model.tokens, (1, 2, 4, 8), steps=8)
    assert found is not None
    assert sorted(t for bucket in found.buckets for hybrid in bucket for t in hybrid) == list(range(64))
    assert passes < 400_000
