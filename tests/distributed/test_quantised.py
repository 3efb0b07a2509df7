"""Quantised backbones under tensor and pipeline parallelism, sharded and offloaded, train as QLoRA does alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import load_stages
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine, Planning
from megatron_mux.runtime import Parallel
from tests import quantised_models
from tests.distributed.conftest import assert_no_problems
from tests.end_to_end.harness import relative
from tests.end_to_end.test_quantised import ADAPTER, LOSS, STEPS, cases, qlora

Wanted = dict[str, tuple[list[float], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("quantised", quantised_models.make_plain) / "plain"


@pytest.fixture(scope="module")
def wanted(path: Path, once: Callable[[str, Callable[[Path], object]], Path]) -> Wanted:
    """What `transformers`, `peft` and bitsandbytes make of each task, on rank 0."""

    def make(directory: Path) -> None:
        alone = {case.name: qlora(path, case) for case in cases(path)}
        torch.save({name: (own.losses, own.tensors) for name, own in alone.items()}, directory / "wanted.pt")

    found: Wanted = torch.load(once("qlora", make) / "wanted.pt", weights_only=True)
    return found


@pytest.mark.parametrize(
    ("tensor", "pipeline", "residence"),
    [(2, 2, "resident"), (1, 2, "sharded-offloaded"), (2, 1, "sharded")],
)
def test_tasks_come_out_as_from_qlora(
    tensor: int,
    pipeline: int,
    residence: Kind,
    path: Path,
    wanted: Wanted,
    joined: Callable[..., Parallel],
) -> None:
    parallel = joined(tensor, pipeline)
    stages = load_stages(path, parallel, residence=residence, quantise="nf4")
    engine = Engine(stages, parallel, Planning("spatial", pipeline))
    tasks = cases(path)
    engine.register_tasks([case.task for case in tasks])
    taken = [engine.step() for _ in range(STEPS)]
    held = quantised_models.held_bytes(stages)
    predicted = quantised_models.predicted_bytes(stages, 4, residence.startswith("sharded"))
    problems = [] if held == pytest.approx(predicted, rel=0.03) else [f"{held} bytes held, not {predicted}"]
    for case in tasks:
        losses, adapter = wanted[case.name]
        found = [step[case.name].loss for step in taken]
        if found != pytest.approx(losses, rel=LOSS):
            problems.append(f"{case.name}: {found} != {losses}")
        tensors = engine.adapter_tensors(case.name)
        if dist.get_rank() == 0:
            assert tensors is not None
            problems += [key for key in adapter if not relative(tensors[key], adapter[key]) <= ADAPTER]
    assert_no_problems(problems)
