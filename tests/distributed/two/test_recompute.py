"""Recomputation changes nothing, and no rank waits for one that has nothing to compute again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import Recompute, load_stages
from megatron_mux.backbone.split import Split
from megatron_mux.engine import Engine, Snapshot, Task
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.test_engine_layouts import cases_of
from tests.end_to_end.harness import Case, random_records, relative

pytestmark = pytest.mark.versions

Layout = tuple[int, int, bool] | tuple[int, int, bool, Split]
SEQUENCE: Layout = (2, 1, True)
VIRTUAL: Layout = (1, 2, False, (1, 1, 1, 1))


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("models", lambda directory: tiny_models.make(directory, "llama")) / "llama"


def _engine(
    path: Path, joined: Callable[..., Parallel], layout: Layout, tasks: list[Task], recompute: Recompute
) -> Engine:
    parallel = joined(*layout[:3])
    stages = load_stages(path, parallel, torch.float64, recompute, layout[3] if len(layout) > 3 else None)
    engine = Engine(stages, parallel)
    engine.register_tasks(tasks)
    return engine


def _tensors(engine: Engine, cases: list[Case]) -> dict[str, Tensor]:
    found = {case.name: engine.adapter_tensors(case.name) or {} for case in cases}
    return {f"{name}/{key}": tensor for name, own in found.items() for key, tensor in own.items()}


def _assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    problems = [key for key in wanted if relative(found[key], wanted[key]) > 1e-9]
    everyone: list[list[str]] = [[], []]
    dist.all_gather_object(everyone, problems)
    assert not any(everyone)


@pytest.fixture(scope="module")
def plain(path: Path, joined: Callable[..., Parallel]) -> dict[str, Tensor]:
    """Adapters of every kind after two steps of two data-parallel ranks, nothing recomputed."""
    cases = cases_of("llama", 96)
    engine = _engine(path, joined, (1, 1, False), [case.task for case in cases], "none")
    for _ in range(2):
        engine.step()
    return _tensors(engine, cases)


@pytest.mark.parametrize(
    ("recompute", "layout"),
    [
        ("full", SEQUENCE),
        ("full", (1, 2, False)),
        ("full", VIRTUAL),
        ("selective", (2, 1, False)),
        ("selective", SEQUENCE),
        ("selective", VIRTUAL),
    ],
)
def test_every_kind_comes_out_the_same(
    recompute: Recompute,
    layout: Layout,
    path: Path,
    joined: Callable[..., Parallel],
    plain: dict[str, Tensor],
) -> None:
    cases = cases_of("llama", 96)
    engine = _engine(path, joined, layout, [case.task for case in cases], recompute)
    for _ in range(2):
        engine.step()
    _assert_same(_tensors(engine, cases), plain)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_rows_that_only_one_rank_holds(
    recompute: Recompute, path: Path, joined: Callable[..., Parallel]
) -> None:
    """The first rank has all rows of a task trained in the first layer, the second those of one in the last."""
    training: dict[str, object] = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 4}
    cases = [
        Case(
            name,
            {"peft_type": "BOTTLENECK", "bottleneck_size": 4, "target_modules": target},
            training,
            random_records(4, 96, length, length, seed=1),
        )
        for name, target, length in (
            ("first", ".*layers.0.*o_proj", 12),
            ("second", ".*layers.3.*o_proj", 12),
        )
    ]
    found = []
    for kind, where in (("none", (1, 1, False)), (recompute, SEQUENCE)):
        engine = _engine(path, joined, where, [case.task for case in cases], kind)
        engine.step()
        found.append(_tensors(engine, cases))
    _assert_same(found[1], found[0])


def test_a_run_goes_on_at_another_division(path: Path, joined: Callable[..., Parallel]) -> None:
    cases = cases_of("llama", 96)
    straight = _engine(path, joined, (1, 1, False), [case.task for case in cases], "none")
    for _ in range(3):
        straight.step()
    wanted = _tensors(straight, cases)

    first = _engine(path, joined, SEQUENCE, [case.task for case in cases], "none")
    first.step()
    tasks = []
    for case in cases:
        state = [first.snapshot(case.name)]
        dist.broadcast_object_list(state, src=0)
        task = case.task
        tasks.append(Task(task.spec, task.data, resume=partial(copy.copy, cast(Snapshot, state[0]))))
    second = _engine(path, joined, (1, 2, False), tasks, "none")
    for _ in range(2):
        second.step()
    _assert_same(_tensors(second, cases), wanted)
