"""More tasks than memory has room for: they wait, train and leave within the budget, and come out as if alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.estimate.run_tables import RunTables
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.runtime import Parallel
from megatron_mux.training.admission import Admission
from tests import tiny_models
from tests.budget import Budget, failing, on_the_host
from tests.end_to_end.families import FAMILIES, lora
from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.harness import Case, assert_close, random_records
from tests.end_to_end.workplace import TASKS, Workplace

pytestmark = pytest.mark.usefixtures("warm_workers")

COUNT = 100
ROOM = 3 << 18
"""Bytes for adapters, what trains them, and activations: of a few of the tasks."""
MARGIN = 0.1
"""Of it, left alone: a step's sequences may be longer than those of the typical step that plans are made for."""


def random_case(i: int, r: Random) -> Case:
    training = {
        "per_device_train_batch_size": r.randint(1, 4),
        "gradient_accumulation_steps": r.choice([1, 1, 1, 2]),
        "learning_rate": 1e-2,
        "max_steps": r.randint(1, 3),
        "seed": i,
    }
    rank, dropout = r.choice([(4, 0.1), (64, 0.0)])
    adapter = lora(FAMILIES["llama"].query_value, r=rank, lora_dropout=dropout)
    return Case(
        f"task-{i}", adapter, training, random_records(r.randint(2, 6), 96, 4, r.randint(6, 24), seed=i)
    )


def alone(case: Case, engine: Engine) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine.register_tasks([case.task])
    losses = []
    while engine.active:
        losses += [step[case.name].loss for step in engine.steps(4)]
    tensors = engine.adapter_tensors(case.name) or {}
    engine.remove_task(case.name)
    return tensors, losses


def test_a_hundred_tasks_come_and_go_within_the_budget(parallel: Parallel, tmp_path: Path) -> None:
    r = Random(11)
    cases = {case.name: case for case in (random_case(i, r) for i in range(COUNT))}
    path = tiny_models.make(tmp_path, "llama", num_hidden_layers=1)
    backbone = Backbone.load(path, parallel, torch.float64)
    about = {"device": "made-up", "kind": "cpu", "threads": 1}
    context = PlanningContext(roofline(backbone.info.shape, about, 8, 1), backbone.info, Mesh(), 8)
    tables = RunTables(context, None, lambda text: None)
    shape = backbone.shape
    loads = [TaskLoad.of(c.spec, c.records.lengths, c.records.label_counts, shape) for c in cases.values()]
    signatures = sorted({load.signature(shape) for load in loads})
    (backbone_bytes,) = tables.memory(Mesh(), "none", signatures, True).persistent(np.zeros(len(signatures)))
    limit = backbone_bytes + ROOM * (1 - MARGIN)
    planner = Planner(replace(context, memory_limit=limit, tables=tables))
    engine = Engine(backbone, parallel, Planning("auto", 1, planner))
    admission = Admission(engine, parallel)
    coming: list[Task] = [case.task for case in cases.values()]
    losses: dict[str, list[float]] = {name: [] for name in cases}
    finished: dict[str, dict[str, torch.Tensor]] = {}
    left: set[str] = set()
    waited = injected = 0

    def fails(batch: PackedBatch) -> bool:
        nonlocal injected
        hit = len(engine.active) > 1 and r.random() < 0.2
        injected += hit
        return hit

    with Budget(ROOM) as budget, failing([backbone], fails):
        while coming or admission.waiting or engine.tasks:
            now, coming = coming[: (count := r.randint(0, 7))], coming[count:]
            engine.register_tasks(admission.offer(now))
            waited = max(waited, len(admission.waiting))
            for step in engine.steps(r.randint(1, 3)):
                for name, result in step.items():
                    assert result.status != "failed", f"{name}: {result.reason}"
                    losses[name].append(result.loss)
                    assert result.step == len(losses[name]), "no step is lost, none taken twice"
                    if result.status == "finished":
                        with on_the_host():
                            finished[name] = engine.adapter_tensors(name) or {}
                        engine.remove_task(name)
            if engine.active and r.random() < 0.4:
                left.add(name := r.choice(engine.active))
                engine.remove_task(name)
    assert budget.failures == 0, "the planner kept to it by itself"
    assert budget.peak > ROOM / 2, "and left no more than it had to"
    assert waited > 5 and injected > 20 and len(left) > 5
    assert finished.keys() == cases.keys() - left, "every task that was taken in and stayed"
    single = Engine(backbone, parallel)
    for name, tensors in sorted(finished.items())[::5]:
        wanted, expected = alone(cases[name], single)
        assert_close(tensors, wanted, 1e-8, name)
        assert max(abs(a - b) for a, b in zip(losses[name], expected, strict=True)) < 1e-8


LARGE = {**TASKS["lora"], "adapter": {**TASKS["lora"]["adapter"], "r": 4096, "lora_dropout": 0.0}}
"""One of these needs 42 MiB, two of them 70: 56 have room for one at a time."""
NAMES = ("first", "second", "third")


def test_a_run_takes_in_what_there_is_room_for(server: Server, workplace: Workplace, tmp_path: Path) -> None:
    path = workplace.write_tasks("large.yaml", dict.fromkeys(NAMES, LARGE))
    run = server.run(
        workplace.arguments("--mux-memory-limit", "56MiB", "--save", tmp_path / "run", tasks=path)
    )
    assert run.status == 0, run.output
    assert "second waits until there is room for it in memory" in run.output
    assert run.output.index("second trains from here on") < run.output.index("third trains from here on")
    for name in NAMES:
        lines = [
            json.loads(line) for line in (tmp_path / "run" / name / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 1 + lines[-1]["step"]))
    path = workplace.write_tasks(
        "larger.yaml", {"much": {**LARGE, "adapter": {**LARGE["adapter"], "r": 1 << 18}}}
    )
    run = server.run(workplace.arguments("--mux-memory-limit", "56MiB", tasks=path))
    assert run.status == 2 and "task 'much'" in run.errors


def test_one_that_waited_and_is_refused_holds_nobody_up(
    server: Server, workplace: Workplace, tmp_path: Path
) -> None:
    path = workplace.write_tasks("large.yaml", dict.fromkeys(NAMES, LARGE))
    fault = Fault("megatron_mux.adapters.attach:AdapterSet.add", 2, "no memory")
    limit = ("--mux-memory-limit", "56MiB", "--save", tmp_path / "run")
    run = server.run(workplace.arguments(*limit, tasks=path), fault)
    assert run.status == 0, run.errors
    assert "second refused: task 'second': there is no memory for its adapter" in run.output
    assert "third trains from here on" in run.output
    manifest = json.loads(sorted((tmp_path / "run" / "manifests").iterdir())[-1].read_text())
    assert {task["name"]: task["status"] for task in manifest["tasks"]} == {
        "first": "finished",
        "third": "finished",
    }
