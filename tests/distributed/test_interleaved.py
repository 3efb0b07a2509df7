"""Hybrid tasks computed in turns come out as one after another, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import Recompute, load_stages
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine
from megatron_mux.fusion.graphs.launch_order import decode
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.quantised.scheme import QuantMethod
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.message_log import logged
from tests.distributed.test_engine_layouts import Layout, cases_of, planning_of


@pytest.fixture(scope="module")
def path_of(once: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[Layout], Path]:
    """A model of two layers; of one for each of four stages."""

    def path(layout: Layout) -> Path:
        layers = max(2, len(layout.split))

        def make(directory: Path) -> None:
            tiny_models.make(directory, "llama", num_hidden_layers=layers)

        return once(f"{layers}-layers", make) / "llama"

    return path


Trained = tuple[list[dict[str, float]], dict[str, Tensor]]


def train(
    path: Path,
    parallel: Parallel,
    layout: Layout,
    kind: Kind,
    recompute: Recompute,
    interleaved: bool,
    quantise: QuantMethod | None,
) -> Trained:
    """Losses of two steps, and this rank's part of the adapters after them."""
    cases = cases_of("llama", 96)
    stages = load_stages(
        path, parallel, torch.float32, recompute, layout.split or None, kind, quantise=quantise
    )
    policy = "in turns" if interleaved else "side by side"
    planning = planning_of(policy, stages[0], parallel, cases, layout.split)
    engine = Engine(stages, parallel, planning)
    engine.register_tasks([case.task for case in cases])
    with logged() as log:
        steps = [engine.step() for _ in range(2)]
    logs: list[list[tuple[str, int]]] = [[]] * parallel.tp_size
    dist.all_gather_object(logs, log, group=parallel.tp_group)
    assert all(other == log for other in logs) and bool(log) is interleaved, "one order on all ranks"
    assert engine._runner.last_plan is not None
    assert bool(engine._runner.last_plan.buckets[0].launch) is interleaved
    losses = [{name: result.loss for name, result in step.items()} for step in steps]
    return losses, {case.name: engine._tasks[case.name].adapter.flat_params.values for case in cases}


@pytest.mark.parametrize(
    ("layout", "kind", "recompute", "quantise"),
    [
        (Layout(2, 1), "resident", "none", None),
        (Layout(2, 1, True), "resident", "full", None),
        (Layout(2, 1), "sharded", "none", "int8"),
        (Layout(2, 2, True, split=(1, 1, 1, 1)), "offloaded", "none", None),
    ],
)
def test_in_turns_as_one_after_another(
    path_of: Callable[[Layout], Path],
    joined: Callable[..., Parallel],
    layout: Layout,
    kind: Kind,
    recompute: Recompute,
    quantise: QuantMethod | None,
) -> None:
    path, parallel = path_of(layout), joined(layout.tensor, layout.pipeline, layout.sequence_parallel)
    losses, adapters = train(path, parallel, layout, kind, recompute, False, quantise)
    again, others = train(path, parallel, layout, kind, recompute, True, quantise)
    assert losses == again
    for name in adapters:
        assert torch.equal(adapters[name], others[name]), name


def test_timed_pieces_are_those_of_the_launch_order(
    path_of: Callable[[Layout], Path], joined: Callable[..., Parallel]
) -> None:
    layout = Layout(2, 2)
    parallel = joined(*layout[:2])
    cases = cases_of("llama", 96)
    stages = load_stages(path_of(layout), parallel, torch.float32)
    engine = Engine(stages, parallel, planning_of("in turns", stages[0], parallel, cases, ()))
    engine.register_tasks([case.task for case in cases])
    engine.step()
    timed: list[TimedAction] = []
    engine.step(timed.append)
    assert engine.last_plan is not None
    launched = [t for t in timed if t.action.is_pass and engine.last_plan.buckets[t.action.bucket].launch]
    in_turn = [t for t in launched if t.parts]
    assert {t.action.kind for t in in_turn} == {"F", "B"}
    assert not any(t.parts for t in timed if t not in launched)
    for own in in_turn:
        order = engine.last_plan.buckets[own.action.bucket].launch[own.action.stage]
        pieces = [part for part in own.parts if not part.message]
        sent = [part for part in own.parts if part.message]
        indices = decode(order.backward if own.action.is_backward else order.forward)
        assert [part.batch for part in pieces] == [i for i in indices if i < own.label.count("|") + 1]
        assert sent and {part.message for part in sent} == {"all_reduce"}
        for lane in (pieces, sent):
            assert all(one.stop <= after.start for one, after in zip(lane, lane[1:], strict=False))
        assert all(own.start <= part.start <= part.stop <= own.stop for part in own.parts)
