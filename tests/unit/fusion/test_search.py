"""Plans found against plans that exist."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.fusion import judge as judge_module
from megatron_mux.fusion.hybrid import consecutive, every_partition
from megatron_mux.fusion.search import DoesNotFitError, exhaustive, plain_equation_6, search
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.structured import schedule
from megatron_mux.pipeline.template import Template
from tests.unit.fusion.synthetic import synthetic

COUNTS = (1, 2, 4)


def test_there_are_as_many_partitions_as_bell_says() -> None:
    assert [sum(1 for _ in every_partition(range(n))) for n in range(8)] == [1, 1, 2, 5, 15, 52, 203, 877]


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
    model = synthetic(seed)
    limit = [room * max(model.tokens)] * len(model.weights)
    found = search(model, model.tokens, COUNTS, limit)
    assert sorted(t for hybrid in found.partition for t in hybrid) == list(range(len(model.tokens)))
    for bucket in found.buckets:
        kept = sum(model.tokens[t] for hybrid in bucket for t in hybrid) / found.micro_batches
        assert kept <= limit[0] * (1 + 1e-9)
    assert found == search(model, model.tokens, COUNTS, limit), "the same plan every time"


def test_what_cannot_fit_is_named() -> None:
    model = synthetic(5, tasks=3)
    largest = max(range(3), key=lambda t: model.tokens[t])
    limit = [model.tokens[largest] / 4 * 0.99] * len(model.weights)
    with pytest.raises(DoesNotFitError) as caught:
        search(model, model.tokens, COUNTS, limit)
    assert largest in caught.value.tasks
    search(model, model.tokens, (8,), limit)


def test_close_to_the_best_of_all_partitions() -> None:
    gaps, plain = [], []
    for seed in range(24):
        model = synthetic(seed, tasks=1 + seed % 6)
        best = exhaustive(model, len(model.tokens), COUNTS).latency
        gaps.append(search(model, model.tokens, COUNTS).latency / best - 1)
        plain.append(plain_equation_6(model, model.tokens, COUNTS).latency / best - 1)
    assert min(gaps) >= -1e-9 and min(plain) >= -1e-9
    assert statistics.median(gaps) <= 0.01 and max(gaps) <= 0.05
    assert statistics.mean(plain) > statistics.mean(gaps), "judging whole plans is worth its time"


def test_balanced_buckets_are_close_to_the_best_buckets() -> None:
    gaps = []
    for seed in range(16):
        model = synthetic(seed, tasks=1 + seed % 5)
        best = exhaustive(model, len(model.tokens), COUNTS, every_bucket=True).latency
        gaps.append(exhaustive(model, len(model.tokens), COUNTS).latency / best - 1)
    assert min(gaps) >= -1e-9
    assert statistics.median(gaps) <= 0.01 and max(gaps) <= 0.05


def test_many_tasks_are_planned_with_bounded_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a bound this one simulates some five million passes.
    passes = 0

    def counted(buckets: list[BucketCost], limit: None, virtual: int) -> tuple[Template, float]:
        nonlocal passes
        passes += 2 * sum(bucket.micro_batches * bucket.stages for bucket in buckets)
        return schedule(buckets, limit, virtual=virtual)

    monkeypatch.setattr(judge_module, "schedule", counted)
    model = synthetic(1, tasks=64, stages=8)
    found = search(model, model.tokens, (1, 2, 4, 8))
    assert sorted(t for hybrid in found.partition for t in hybrid) == list(range(64))
    assert passes < 400_000
