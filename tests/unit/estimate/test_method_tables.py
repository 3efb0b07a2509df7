"""Tables of a ranking: which runs are asked for, and what becomes of those that fail. No dry run is made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock, Thread, current_thread
from typing import Any, ClassVar

import numpy as np
import pytest

from megatron_mux.choice.task_file import TaskFile
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.errors import UserError
from megatron_mux.estimate import method_tables
from megatron_mux.estimate.method_tables import MethodTables
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import Group, PassTable, PersistentBytes, StageTable
from megatron_mux.gpus import known
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.worker import WorkerError
from tests.unit.memory.traced import LLAMA

ROW, WEIGHTS = 8.0, 1000.0


class Asked:
    """Stands for `Tables`: remembers the runs that it is asked for."""

    runs: ClassVar[list[RunSpec]] = []
    broken: ClassVar[set[int]] = set()
    lock = Lock()

    def __init__(self, run: RunSpec, *_: Any, **more: Any) -> None:
        assert more == {"chunks": False}
        self.run = run

    def memory(self, signatures: Sequence[Signature]) -> Memory:
        with self.lock:
            self.runs.append(self.run)
        if self.run.tensor in self.broken:
            raise WorkerError("it was killed")
        stages = self.run.plan.stages
        width = 11 + 2 * len(signatures)
        passes: dict[Group, PassTable] = {
            (0,): PassTable(np.zeros(width), np.zeros(width), np.zeros((1, width)), np.zeros(1), ("a pass",))
        }
        nothing = np.zeros(len(signatures))
        persistent = PersistentBytes(WEIGHTS, nothing, nothing, nothing, nothing)
        table = StageTable(1, persistent, PersistentBytes(0.0, *(nothing,) * 4), passes)
        return Memory(signatures, [table] * stages, [1] * stages, 64, ROW)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Asked]]:
    monkeypatch.setattr(method_tables, "Tables", Asked)
    yield Asked
    Asked.runs.clear()
    Asked.broken.clear()


@pytest.fixture
def file(tmp_path: Path) -> TaskFile:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    lora = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    training = {"max_steps": 1, "per_device_train_batch_size": 8}
    tasks = [
        {
            "name": f"r{r}",
            "adapter": {**lora, "r": r},
            "data": {"path": "none", "max_length": 8},
            "training": training,
        }
        for r in (3, 8, 64)
    ]
    (tmp_path / "tasks.yaml").write_text(json.dumps({"tasks": tasks}))
    return TaskFile.read(tmp_path / "config.json", tmp_path / "tasks.yaml")


def of(file: TaskFile) -> MethodTables:
    return MethodTables(file, "bf16", known("H100").gpu)


def test_methods_are_prepared_once_and_tasks_share_signatures(asked: type[Asked], file: TaskFile) -> None:
    tables = of(file)
    methods = [
        ParallelConfig(),
        ParallelConfig(tensor=2),
        ParallelConfig(pipeline=2),
        ParallelConfig(recompute="full"),
    ]
    tables.prepare(methods)
    assert len(asked.runs) == len(methods)
    found = [tables(method) for method in methods]
    assert len(asked.runs) == len(methods), "what was prepared is known"
    assert all(one.columns == [0, 0, 1] for one in found), "ranks up to eight have one signature"
    assert all(one.counts.tolist() == [1 + 3 / 8, 1.0] for one in found)
    assert {run.dtype for run in asked.runs} == {"bfloat16"}


def test_a_method_that_fails_harms_no_others(asked: type[Asked], file: TaskFile) -> None:
    asked.broken.add(2)
    tables = of(file)
    methods, known = (
        [ParallelConfig(tensor=2), ParallelConfig(), ParallelConfig(tensor=2, pipeline=2)],
        list[tuple[ParallelConfig, Thread]](),
    )
    tables.prepare(methods, lambda method: known.append((method, current_thread())))
    assert sorted(map(str, methods)) == sorted(str(method) for method, _ in known)
    assert {thread for _, thread in known} == {current_thread()}
    assert tables(ParallelConfig()).memories
    for method in (ParallelConfig(tensor=2), ParallelConfig(tensor=2, pipeline=2)):
        with pytest.raises(UserError, match="cannot be predicted: it was killed"):
            tables(method)
    assert len(asked.runs) == 3, "nor is it tried again"


def test_a_fault_ends_all_dry_runs(
    asked: type[Asked], file: TaskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def fault(self: Asked, signatures: Sequence[Signature]) -> Memory:
        raise KeyError("a fault")

    monkeypatch.setattr(asked, "memory", fault)
    monkeypatch.setattr(method_tables, "end_worker", lambda: ended.append(True))
    with pytest.raises(KeyError, match="a fault"):
        of(file).prepare([ParallelConfig(tensor=2), ParallelConfig()])
    assert ended


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (ParallelConfig(offload=True), 0.0),
        (ParallelConfig(data=4, zero=3), WEIGHTS / 4),
        (ParallelConfig(data=4, zero=3, offload=True), 0.0),
        (ParallelConfig(data=4), WEIGHTS),
    ],
)
def test_weights_elsewhere_are_priced_from_resident_ones(
    asked: type[Asked], file: TaskFile, method: ParallelConfig, kept: float
) -> None:
    (memory,) = of(file)(method).memories
    (run,) = asked.runs
    assert run.residence == "resident" and run.plan.data == method.data
    assert memory.persistent_parts(np.zeros(2))["backbone"].tolist() == [kept]
    (table,) = memory.tables
    held = table.passes[0,].moments[0]
    assert (held[0] > 0) == (kept < WEIGHTS), "two units are in place"
    # One stage has both ends of the pipeline.
    assert held[11] == (3 * ROW if kept < WEIGHTS else 0) and table.passes[0,].kept[11] == held[11] * 2 / 3


def test_a_quantised_backbone_is_run_where_its_weights_are(asked: type[Asked], file: TaskFile) -> None:
    quantised = TaskFile.read(file.path.parent / "config.json", file.path, quantise="nf4")
    of(quantised)(ParallelConfig(data=2, zero=3))
    assert [run.residence for run in asked.runs] == ["sharded"]
