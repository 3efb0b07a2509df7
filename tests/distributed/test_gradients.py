"""Gradients, clipped by the whole norm, are those of one process: every template, layout and residence; fp64 and fp32.

The gradients are those of a second step: what is still zero in a fresh adapter is not any more. Optimizers are SGD, so
that a rounding stays one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import Recompute, load_stages
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.test_engine_layouts import Layout, cases_of, planning_of
from tests.end_to_end.harness import Case, relative

pytestmark = pytest.mark.versions

LAYOUTS: dict[str, Layout] = {
    "1": Layout(1, 1),
    "TP2": Layout(2, 1),
    "SP2": Layout(2, 1, True),
    "PP2": Layout(1, 2),
    "PP2 uneven": Layout(1, 2, split=(3, 1)),
    "PP2 virtual": Layout(1, 2, split=(1, 1, 1, 1)),
    "TP2xPP2": Layout(2, 2),
    "SP2xPP2 virtual": Layout(2, 2, True, split=(1, 1, 1, 1)),
    "PP4": Layout(1, 4),
}
"""The rest of four processes is data parallel."""

# Relative Frobenius norm of a tensor's part on a rank.
LIMITS = {torch.float64: 1e-10, torch.float32: 5e-5}


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("models", lambda directory: tiny_models.make(directory, "llama")) / "llama"


def _cases() -> list[Case]:
    found = []
    for case in cases_of("llama", 96):
        case.training.update(optim="sgd", learning_rate=0.5)
        found.append(case)
    return found


def _gradients(
    path: Path,
    parallel: Parallel,
    dtype: torch.dtype,
    policy: str,
    split: tuple[int, ...] = (),
    kind: Kind = "resident",
    recompute: Recompute = "none",
) -> tuple[dict[str, Tensor], Engine]:
    """This rank's part of every gradient of the second step, after clipping, by task and key."""
    cases, found = _cases(), {}
    stages = load_stages(path, parallel, dtype, recompute, split or None, kind)
    engine = Engine(stages, parallel, planning_of(policy, stages[0], parallel, cases, split))
    engine.register_tasks([case.task for case in cases])

    def clip(name: str, optimizer: TaskOptimizer, norm: Tensor) -> None:
        TaskOptimizer.clip(optimizer, norm)
        for p in optimizer.parameters:
            assert p.value.grad is not None
            found[f"{name}/{p.key}"] = p.value.grad.clone()

    for name, running in engine._tasks.items():
        running.optimizer.clip = partial(clip, name, running.optimizer)  # type: ignore[method-assign]
    engine.step()
    engine.step()
    return found, engine


@pytest.fixture(scope="module")
def wanted(path: Path, joined: Callable[..., Parallel]) -> Callable[[torch.dtype], dict[str, Tensor]]:
    """What one process computes, by dtype; every rank for itself."""
    known: dict[torch.dtype, dict[str, Tensor]] = {}

    def of(dtype: torch.dtype) -> dict[str, Tensor]:
        if dtype not in known:
            here = joined(1, 1)
            alone = replace(here, rank=0, world_size=1, dp_rank=0, dp_size=1, dp_group=here.tp_group)
            known[dtype] = _gradients(path, alone, dtype, "spatial")[0]
        return known[dtype]

    return of


@pytest.mark.parametrize(
    ("dtype", "layout", "policy", "kind", "recompute"),
    [
        (torch.float64, "1", "temporal", "sharded", "none"),
        (torch.float64, "1", "chunks", "sharded-offloaded", "full"),
        (torch.float64, "TP2", "side by side", "resident", "selective"),
        (torch.float64, "SP2", "chunks", "sharded", "none"),
        (torch.float64, "PP2", "auto", "resident", "none"),
        (torch.float64, "PP2", "gpipe", "offloaded", "none"),
        (torch.float64, "PP2 uneven", "chunks", "sharded", "full"),
        (torch.float64, "PP2 virtual", "interleaved", "sharded", "none"),
        (torch.float64, "TP2xPP2", "temporal", "offloaded", "none"),
        (torch.float64, "SP2xPP2 virtual", "side by side", "offloaded", "full"),
        (torch.float64, "TP2", "halves", "resident", "none"),
        (torch.float64, "TP2xPP2", "in turns", "resident", "none"),
        (torch.float64, "SP2xPP2 virtual", "halves", "sharded", "full"),
        (torch.float32, "SP2", "temporal", "resident", "full"),
        (torch.float32, "TP2xPP2", "auto", "offloaded", "none"),
        (torch.float32, "PP4", "chunks", "resident", "none"),
    ],
)
def test_gradients_are_those_of_one_process(
    dtype: torch.dtype,
    layout: str,
    policy: str,
    kind: Kind,
    recompute: Recompute,
    wanted: Callable[[torch.dtype], dict[str, Tensor]],
    path: Path,
    joined: Callable[..., Parallel],
) -> None:
    expected = wanted(dtype)
    tp, pp, sequence_parallel, split = LAYOUTS[layout]
    parallel = joined(tp, pp, sequence_parallel)
    found, engine = _gradients(path, parallel, dtype, policy, split, kind, recompute)
    parts = {
        f"{name}/{p.key}": p.slice_of(expected[f"{name}/{p.key}"])
        for name, running in engine._tasks.items()
        for p in running.optimizer.parameters
    }
    far = {key: relative(found[key], part) for key, part in parts.items()}
    problems = [f"{key}: {distance:.1e}" for key, distance in far.items() if not distance <= LIMITS[dtype]]
    if sum(float(part.norm()) > 0 for part in parts.values()) < len(parts) / 2:
        problems.append("most gradients are zero: nothing is compared")
    everyone: list[tuple[list[str], float]] = [([], 0.0) for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, (problems, max(far.values(), default=0.0)))
    if dist.get_rank() == 0:
        worst = max(distance for _, distance in everyone)
        print(f"\n{layout} {policy} {kind} {recompute} {dtype}: worst tensor {worst:.1e}")
    assert not any(own for own, _ in everyone), "\n".join(p for own, _ in everyone for p in own[:20])
