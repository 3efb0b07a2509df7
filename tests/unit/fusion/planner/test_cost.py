"""Costs of hybrid tasks and buckets, and bounds on what a pipeline can reach."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.fusion.planner.cost import HybridCost, bucket_cost, fits, lower_bounds, pipeline_latency
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.structured import StructuredRun
from megatron_mux.pipeline.template import gpipe, one_f_one_b, plain
from tests.unit.fusion.planner.synthetic import synthetic


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equation_4_is_a_pipeline_of_equal_stages(stages: int) -> None:
    cost = HybridCost(6, (2.0,) * stages, (3.0,) * stages)
    found = simulate(one_f_one_b(stages, plain([6])), [bucket_cost([cost])])
    assert pipeline_latency(cost) == pytest.approx(found.latency)


def _cost(compute: float, messages: float, memory: tuple[float, ...] = ()) -> HybridCost:
    return HybridCost(
        micro_batches=4,
        forward=(compute,),
        backward=(2 * compute,),
        memory=memory,
        communication_forward=(messages,),
        communication_backward=(2 * messages,),
    )


def test_communication_is_exposed_in_a_bucket_of_one() -> None:
    costs = [_cost(1.0, 0.5, memory=(3.0,)) for _ in range(2)]
    alone, together = bucket_cost(costs[:1]), bucket_cost(costs)
    assert (alone.forward, alone.backward, alone.memory) == ((1.5,), (3.0,), (3.0,))
    assert (together.forward, together.backward, together.memory) == ((2.0,), (4.0,), (6.0,))
    assert fits(together, [6.0]) and not fits(together, [5.0]) and fits(together, None)


@pytest.mark.parametrize(
    ("compute", "messages", "seconds"),
    [
        ((1.0, 1.0), (0.5, 0.5), 2.0),  # hidden behind each other's computation
        ((1.0, 1.0), (1.5, 1.5), 3.0),  # the link is busy longer than the stage
        ((0.1, 1.0), (0.1, 3.0), 4.0),  # one hybrid task's computation hides none of its own communication
        ((1.0, 2.0, 1.0), (0.0, 0.0, 0.0), 4.0),
    ],
)
def test_only_so_much_communication_hides(
    compute: tuple[float, ...], messages: tuple[float, ...], seconds: float
) -> None:
    costs = [_cost(c, m) for c, m in zip(compute, messages, strict=True)]
    together = bucket_cost(costs)
    assert together.forward == pytest.approx((seconds,))
    assert together.backward == pytest.approx((2 * seconds,))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_nothing_beats_the_lower_bound(seed: int, micro_batches: int) -> None:
    model = synthetic(seed)
    stages = len(model.weights)
    buckets = [bucket_cost([model.hybrid((t,), micro_batches)]) for t in range(len(model.tokens))]
    bound = lower_bounds([buckets])[0] * (1 - 1e-9)
    sizes = plain([micro_batches] * len(buckets))
    for latency in (
        StructuredRun(buckets).latency,
        simulate(gpipe(stages, sizes), buckets).latency,
        simulate(one_f_one_b(stages, sizes), buckets).latency,
    ):
        assert latency >= bound
