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

from megatron_mux.backbone.model import Recompute, load_stages
from megatron_mux.engine import Engine, Snapshot, Task
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.conftest import assert_no_problems
from tests.distributed.test_engine_layouts import (
    Layout,
    Results,
    Tensors,
    cases_of,
    differences,
    train_on,
)
from tests.end_to_end.harness import Case, random_records

pytestmark = pytest.mark.versions

DATA, SEQUENCE, VIRTUAL = Layout(1, 1), Layout(2, 1, True), Layout(1, 2, split=(1, 1, 1, 1))


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("models", lambda directory: tiny_models.make(directory, "llama")) / "llama"


@pytest.fixture(scope="module")
def plain(path: Path, joined: Callable[..., Parallel]) -> tuple[Results, Tensors]:
    """What becomes of tasks of every kind on two data-parallel ranks, nothing recomputed."""
    return train_on(joined, path, cases_of("llama", 96), DATA, "spatial")


@pytest.mark.parametrize(
    ("recompute", "layout"),
    [("full", SEQUENCE), ("full", VIRTUAL), ("selective", SEQUENCE), ("selective", VIRTUAL)],
)
def test_every_kind_comes_out_the_same(
    recompute: Recompute,
    layout: Layout,
    path: Path,
    joined: Callable[..., Parallel],
    plain: tuple[Results, Tensors],
) -> None:
    found = train_on(joined, path, cases_of("llama", 96), layout, "spatial", recompute=recompute)
    assert_no_problems(differences(found, plain, f"{recompute} {layout}"))


def test_rows_that_only_one_rank_holds(path: Path, joined: Callable[..., Parallel]) -> None:
    """The first rank has all rows of a task trained in the first layer, the second those of one in the last."""
    training: dict[str, object] = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 4}
    cases = [
        Case(
            name,
            {"peft_type": "BOTTLENECK", "bottleneck_size": 4, "target_modules": target},
            training,
            random_records(4, 96, 12, 12, seed=1),
        )
        for name, target in (("first", ".*layers.0.*o_proj"), ("second", ".*layers.3.*o_proj"))
    ]
    wanted = train_on(joined, path, cases, DATA, "spatial")
    found = train_on(joined, path, cases, SEQUENCE, "spatial", recompute="full")
    assert_no_problems(differences(found, wanted, "rows of one rank"))


def test_a_run_goes_on_at_another_division(
    path: Path, joined: Callable[..., Parallel], plain: tuple[Results, Tensors]
) -> None:
    def engine_of(layout: Layout, tasks: list[Task]) -> Engine:
        parallel = joined(*layout[:3])
        engine = Engine(load_stages(path, parallel, torch.float64), parallel)
        engine.register_tasks(tasks)
        return engine

    tasks = [case.task for case in cases_of("llama", 96)]
    first = engine_of(SEQUENCE, tasks)
    steps = [first.step()]
    resumed = []
    for task in tasks:
        state = [first.snapshot(task.spec.name)]
        dist.broadcast_object_list(state, src=0)
        resumed.append(Task(task.spec, task.data, resume=partial(copy.copy, cast(Snapshot, state[0]))))
    second = engine_of(Layout(1, 2), resumed)
    steps += [second.step() for _ in range(2)]
    results = [{name: (r.loss, r.grad_norm, r.tokens) for name, r in step.items()} for step in steps]
    tensors = {name: second.adapter_tensors(name) for name in second.tasks}
    assert_no_problems(differences((results, tensors), plain, "divided otherwise"))
