"""Limits of memory: a plan under one always has one, and keeps to it in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from megatron_mux.errors import UserError
from megatron_mux.footprint.content import COUNTS
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.signature import Signature
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.cost import kept_limit
from megatron_mux.fusion.planner.plan_evaluator import PlanEvaluator
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.kernels.attention.short import LONGEST, pairs_and_padding
from megatron_mux.memory.forms.method import Recompute
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.structured import StructuredRun
from tests.unit.fusion import backbone
from tests.unit.fusion.planner.limits import MESHES, limited_planner, most_bytes
from tests.unit.fusion.planner.test_step_memory import tables_of


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 10_000), st.sampled_from(MESHES), st.floats(0.0, 1.1))
@example(101, Mesh(), 0.24611230194568634)  # its longest sequence takes less a token than shorter ones
def test_a_plan_under_a_limit_has_one_and_keeps_to_it(seed: int, mesh: Mesh, share: float) -> None:
    loads = backbone.random_loads(seed, 1 + seed % 5)
    limited = limited_planner(loads, mesh, share)
    try:
        plan = limited.plan(loads)
    except UserError:
        with pytest.raises(UserError):
            limited.check(loads)
        return
    assert (
        limited.memory_limit is not None and limited.fits(plan) and len(plan.activation_limit) == plan.ranks
    )
    assert most_bytes(plan, limited.context) <= limited.memory_limit * (1 + 1e-6)


@pytest.mark.parametrize("chunk", [None, 64])
def test_a_plain_plan_counts_records_longer_than_those_of_a_typical_step(chunk: int | None) -> None:
    loads = {name: backbone.load(name, [64] * 4, longest=512) for name in "ab"}
    context = PlanningContext(
        backbone.profile(),
        backbone.info(),
        Mesh(pipeline=2),
        chunk=chunk,
        tables=backbone.MadeUpTables(),
    )
    evaluator = PlanEvaluator(context.with_tasks(loads))
    found = evaluator.with_longest(evaluator.evaluate(evaluator.of_policy("spatial", micro_batches=4)))
    assert most_bytes(found.plan, evaluator.context) <= max(found.memory) * (1 + 1e-9)


def test_what_one_bucket_works_with_is_no_reason_to_drop_the_limit() -> None:
    """One bucket keeps 9 of 10 bytes, the other works with 5: each fits, the first alone."""
    buckets = [
        BucketCost(3, (1.0, 1.0), (2.0, 2.0), memory=(9.0, 9.0)),
        BucketCost(3, (1.0, 1.0), (2.0, 2.0), memory=(1.0, 1.0), working=(5.0, 5.0)),
    ]
    limit = kept_limit(buckets, [10.0, 10.0])
    assert limit == [5.0, 5.0]
    run = StructuredRun(buckets, limit)
    assert max(run.peaks()) <= 10.0
    assert simulate(run.template(), buckets).peaks == tuple(run.peaks())


def test_a_step_of_an_optimizer_may_take_the_most() -> None:
    """More than any pass: it is what is predicted, and what does not fit."""
    loads = {"t": backbone.load("t", [64] * 4)}
    tables = backbone.MadeUpTables(updating=1e9)
    context = PlanningContext(backbone.profile(), backbone.info(), Mesh(pipeline=2), tables=tables)
    evaluator = PlanEvaluator(context.with_tasks(loads))
    needed = [held + 1e9 * 4 for held in evaluator.resident]  # of each of a stage's layers
    assert Planner(context).plan(loads).memory_bytes == pytest.approx(needed)
    Planner(replace(context, memory_limit=max(needed) + 1)).check(loads)
    with pytest.raises(UserError, match="the memory limit of"):
        Planner(replace(context, memory_limit=max(needed) - 1)).check(loads)


class OfPairs(backbone.MadeUpTables):
    """A CPU's memory: a byte for each pair of tokens whose weights short sequences keep, and what lasts."""

    def memory(
        self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool = True
    ) -> Memory:
        return tables_of(signatures, COUNTS.index("pairs"))


def test_the_longest_record_need_not_be_the_one_that_does_not_fit() -> None:
    loads = {"t": backbone.load("t", [LONGEST, LONGEST + 1])}  # the longer one keeps no pairs
    context = PlanningContext(backbone.profile(), backbone.info(), tables=OfPairs())
    (resident,) = PlanEvaluator(context.with_tasks(loads)).resident
    needed = resident + pairs_and_padding([LONGEST])[0]
    fitting = Planner(replace(context, memory_limit=needed + 1))
    fitting.check(loads)
    assert fitting.plan(loads).memory_bytes[0] <= needed + 1
    with pytest.raises(UserError, match="task 't': one sequence of"):
        Planner(replace(context, memory_limit=needed - 1)).check(loads)
