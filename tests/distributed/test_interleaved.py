"""Hybrid tasks computed in turns come out as one after another, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mux.backbone.model import Recompute, load_stages
from megatron_mux.backbone.residence import Kind
from megatron_mux.engine import Engine
from megatron_mux.fusion.launch_order import LaunchOrder, PieceCost, encode, kahn
from megatron_mux.fusion.plan import Bucket, Plan
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.test_engine_layouts import Layout, cases_of, planning_of


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("interleaved", lambda directory: tiny_models.make(directory, "llama")) / "llama"


def in_turns(plan: Plan, layers: int, sequence_parallel: bool, recompute: bool) -> Plan:
    """The plan with Algorithm 1's launch order in each bucket of several hybrid tasks."""
    messages = (4 if sequence_parallel else 2) * layers

    def order(count: int, bucket: Bucket) -> str:
        chain = [PieceCost(1.0, 1.0)] * count + [PieceCost(1.0)]
        return encode(kahn([chain] * len(bucket.hybrid_tasks)))

    def launch(bucket: Bucket) -> tuple[LaunchOrder, ...]:
        one = LaunchOrder(order(messages, bucket), order(messages * (1 + recompute), bucket))
        return (one,) * plan.stages if len(bucket.hybrid_tasks) > 1 else ()

    return replace(plan, buckets=tuple(replace(b, launch=launch(b)) for b in plan.buckets))


@pytest.mark.parametrize(
    ("layout", "kind", "recompute"),
    [
        (Layout(2, 1), "resident", "none"),
        (Layout(2, 1, True), "resident", "none"),
        (Layout(2, 1), "resident", "full"),
        (Layout(2, 1, True), "resident", "full"),
        (Layout(2, 1, True), "resident", "selective"),
        (Layout(2, 1), "sharded", "none"),
        (Layout(2, 1), "offloaded", "full"),
        (Layout(2, 2), "resident", "none"),
        (Layout(2, 2, True, split=(1, 1, 1, 1)), "offloaded", "none"),
    ],
)
def test_in_turns_as_one_after_another(
    path: Path, joined: Callable[..., Parallel], layout: Layout, kind: Kind, recompute: Recompute
) -> None:
    parallel = joined(layout.tensor, layout.pipeline, layout.sequence_parallel)
    cases = cases_of("llama", 96)
    found = []
    for interleaved in (False, True):
        stages = load_stages(path, parallel, torch.float32, recompute, layout.split or None, kind)
        planning = planning_of("side by side", stages[0], parallel, cases, layout.split)
        layers = stages[0].shape.layers // max(1, planning._plan.stages)
        if interleaved:
            planning._plan = in_turns(planning._plan, layers, layout.sequence_parallel, recompute == "full")
        engine = Engine(stages, parallel, planning)
        engine.register_tasks([case.task for case in cases])
        losses = [engine.step() for _ in range(3)]
        assert bool(engine._runner.last_plan.buckets[0].launch) is interleaved
        found.append(
            (
                [{name: result.loss for name, result in step.items()} for step in losses],
                {case.name: engine._tasks[case.name].adapter.arena.values.clone() for case in cases},
            )
        )
    (losses, before), (again, after) = found
    assert losses == again
    for name in before:
        assert torch.equal(before[name], after[name]), name
