"""With experts, too, hybrid tasks computed in turns come out as one after another, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import Backbone, load_stages
from megatron_mux.backbone.registry import read_shape
from megatron_mux.engine import Engine, Planning
from megatron_mux.expert_shape import Placement
from megatron_mux.fusion.graphs.launch_order import LaunchOrder, PieceCost, encode, kahn
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan
from megatron_mux.fusion.planner.backbone_time import BackboneTimeModel
from megatron_mux.fusion.planner.messages import LayerParallelism as Ways
from megatron_mux.fusion.planner.messages import Messages
from megatron_mux.fusion.profiler.expert_managers import with_managers
from megatron_mux.fusion.profiler.layer_operators import ORDER
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.runtime import Parallel
from tests.distributed.message_log import logged
from tests.distributed.rendezvous import run_under_the_rules
from tests.distributed.test_expert_layouts import Layout, cases_of, of_latent_attention
from tests.distributed.test_expert_managers import uneven
from tests.distributed.test_experts import scattered
from tests.end_to_end.harness import Case
from tests.traffic import MESSAGES

BUCKETS = (
    # A sequence of `one` in a step: most ranks have no rows of that hybrid task.
    Bucket((HybridTask(("bottle", "experts")), HybridTask(("few_experts", "high")), HybridTask(("one",))), 1),
    Bucket((HybridTask(("lora",)), HybridTask(("linear", "prefix"))), 2),
)
Trained = tuple[list[dict[str, tuple[float, ...]]], dict[str, Tensor]]


def placement_of(path: Path, layout: Layout) -> Placement | None:
    if layout.managers:
        return uneven(read_shape(path))
    return scattered(read_shape(path), layout.expert) if layout.scattered else None


def some_cases(balanced: bool = False) -> list[Case]:
    """Tasks of many kinds, and one with a sequence in a step; some with a balancing loss, if wanted."""
    several = cases_of(96, balanced)
    one = next(case for case in several if case.name == "experts")
    training = {**one.training, "per_device_train_batch_size": 1}
    return [*several, Case("one", one.adapter, training, one.records)]


def taking_turns(plan: Plan, stages: Sequence[Backbone], path: Path, layout: Layout) -> Plan:
    """The plan with Algorithm 1's launch orders; stages with and without experts have other pieces."""
    everyones: list[dict[int, tuple[int, int]]] = [{}] * dist.get_world_size()
    own = {stage.layers.start: (stage.pieces.forward, stage.pieces.backward) for stage in stages}
    dist.all_gather_object(everyones, own)
    merged = {start: counts for one in everyones for start, counts in one.items()}
    assert [merged[start] for start in sorted(merged)] == planned_pieces(path, layout, sorted(merged))

    def order(count: int, batches: int) -> str:
        return encode(kahn([[PieceCost(1.0, 1.0)] * count] * batches))

    def launch(batches: int) -> tuple[LaunchOrder, ...]:
        both = [[order(count, batches) for count in merged[start]] for start in sorted(merged)]
        return tuple(LaunchOrder(*own) for own in both)

    return replace(plan, buckets=tuple(replace(b, launch=launch(b.batches)) for b in plan.buckets))


def planned_pieces(path: Path, layout: Layout, starts: Sequence[int]) -> list[tuple[int, int]]:
    """For each stage, the pieces that the planner counts, forward and backward."""
    shape = read_shape(path)
    about = {"device": "made-up", "kind": "cpu", "threads": 1, "expert_parallel": layout.expert}
    profile = roofline(shape, {**about, "expert_tensor": 1}, 4, layout.tensor, most_tokens=64)
    stages = [range(*ends) for ends in pairwise([*starts, shape.layers])]
    frozen = BackboneTimeModel(profile, shape, stages)
    if layout.managers:
        frozen = BackboneTimeModel(with_managers(profile, shape, layout.managers), shape, stages)
    exchanges = layout.expert > 1 or layout.managers > 0
    ways = Ways(layout.tensor > 1, layout.tensor > 1, exchanges, layout.recompute == "full")
    nothing = np.zeros((1, 2, len(ORDER)))
    (kinds,) = Messages(frozen, shape, ways).layers(np.array([8.0]), np.zeros((1, 2)), nothing)
    forward, backward = ([len(own.pieces) for own in way] for way in kinds)
    of_layers = [(forward[kind], backward[kind]) for kind in frozen.kinds]
    return [
        tuple(1 + sum(own) for own in zip(*of_layers[layers.start : layers.stop], strict=True))
        for layers in stages
    ]


def train(
    path: Path, parallel: Parallel, layout: Layout, cases: list[Case], dtype: torch.dtype, in_turns: bool
) -> Trained:
    """Results of two steps, and this rank's part of the adapters after them."""
    stages = load_stages(
        path,
        parallel,
        dtype,
        layout.recompute,
        layout.split or None,
        layout.residence,
        placement=placement_of(path, layout),
    )
    plan = Plan("auto", sum(s.parallel.pp_size for s in stages), BUCKETS, len(stages), layout.split)
    given = taking_turns(plan, stages, path, layout) if in_turns else plan
    engine = Engine(stages, parallel, Planning("auto", plan.stages, given=given))
    engine.register_tasks([case.task for case in cases])
    with logged() as log:
        steps = [engine.step() for _ in range(2)]
    # A master and its managers differ in what they wait for, not in what they yield.
    own = [entry for entry in log if entry[0] in ("sizes", *MESSAGES)]
    logs = [own] * parallel.experts.group.size()
    dist.all_gather_object(logs, own, group=parallel.experts.group)
    assert all(other == own for other in logs) and bool(own) is in_turns, "one order on all expert ranks"
    losses: list[dict[str, tuple[float, ...]]] = [
        {
            name: (result.loss, result.grad_norm, result.router_aux_loss or 0.0)
            for name, result in step.items()
        }
        for step in steps
    ]
    assert all(len(step) == len(cases) for step in losses)
    engine.close()
    return losses, {case.name: engine._tasks[case.name].adapter.flat_params.values.clone() for case in cases}


@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [
        ("mixtral", Layout(1, 1, 2), torch.float32),
        ("deepseek_v3", Layout(1, 1, 4, scattered=True, recompute="full"), torch.float64),
        ("qwen3_moe", Layout(1, 2, 2, split=(1, 1, 1, 1), scattered=True), torch.float32),
        ("deepseek_v3", Layout(2, 1, 2, scattered=True), torch.float64),
        ("qwen3_moe", Layout(2, 2, 2, recompute="full"), torch.float32),
        ("deepseek_v3", Layout(1, 1, 1, managers=3), torch.float64),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else str(x),
)
def test_in_turns_as_one_after_another(
    family: str,
    layout: Layout,
    dtype: torch.dtype,
    model_of: Callable[[str], Path],
    joined: Callable[..., Parallel],
) -> None:
    path = model_of(family)
    cases = some_cases(balanced=family == "qwen3_moe")
    if family == "deepseek_v3":
        cases = [of_latent_attention(case) for case in cases]
    sizes = layout.tensor, layout.pipeline, layout.tensor > 1, layout.expert, 1, layout.managers
    parallel = joined(*sizes)
    losses, adapters = train(path, parallel, layout, cases, dtype, in_turns=False)
    again, others = train(path, parallel, layout, cases, dtype, in_turns=True)
    assert losses == again
    for name in adapters:
        assert torch.equal(adapters[name], others[name]), name


@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 1, 2)], ids=["pipeline", "tensor"])
def test_messages_follow_the_rules_of_nccl(
    layout: Layout, model_of: Callable[[str], Path], joined: Callable[..., Parallel]
) -> None:
    path = model_of("mixtral")
    parallel = joined(layout.tensor, layout.pipeline, layout.tensor > 1, layout.expert)
    cases = some_cases()

    def work() -> None:
        train(path, parallel, layout, cases, torch.float32, in_turns=True)

    rules, problem = run_under_the_rules(work)
    assert not problem, problem
    assert sum(count for name, count in rules.met.items() if "alltoall" in name) > 100, rules.met
