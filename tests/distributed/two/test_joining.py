"""A task file appears while two ranks train: one of them tokenises its data, and both admit it for the same step."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_mux.backbone.model import load_stages
from megatron_mux.data.background import BackgroundTokenising
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Engine, Planning
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import load_task_file
from megatron_mux.training import joining
from megatron_mux.training.commands import SharedCommands
from megatron_mux.training.joining import WatchedDirectory
from megatron_mux.training.task_registry import TaskRegistry
from megatron_mux.training.task_setup import open_tasks
from tests import warm
from tests.end_to_end.workplace import TASKS, Workplace, furnish
from tests.unit.training.test_task_registry import Reporter

LIMIT_S = 60.0


def task_file(workplace: Workplace, name: str) -> Path:
    own = {**TASKS["diff"], "data": {"path": str(workplace.root / f"{name}.jsonl"), "max_length": 16}}
    return workplace.write_tasks(
        f"{name}.yaml", {name: {**own, "training": {**own["training"], "max_steps": 10**6}}}
    )


def prepare(directory: Path) -> None:
    workplace = furnish(directory)
    for number, name in enumerate(("first", "second")):  # not in the cache of tokens
        workplace.write_records(f"{name}.jsonl", [{"text": f"w{number} w{i} w1 w2"} for i in range(9)])
    task_file(workplace, "first")
    (directory / "watched").mkdir()


def test_one_rank_tokenises_and_both_admit_at_the_same_step(
    once: Callable[[str, Callable[[Path], Any]], Path],
    joined: Callable[..., Parallel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", os.environ.get(warm.VARIABLE, sys.executable))
    started: list[BackgroundTokenising] = []

    class Noted(BackgroundTokenising):
        def __init__(self, *given: Any) -> None:
            started.append(self)
            super().__init__(*given)

    monkeypatch.setattr(joining, "BackgroundTokenising", Noted)
    workplace = Workplace(once("joining", prepare))
    parallel = joined(1, 1)
    stages = load_stages(workplace.backbone, parallel, torch.float64)
    engine, info = Engine(stages, parallel, Planning("spatial", 1)), stages[0].info
    reporter: Any = Reporter()
    files = DataFiles(load_tokenizer(workplace.backbone), reporter.say)
    registry = TaskRegistry(engine, parallel, reporter, info, files, callbacks=[])
    watched = SharedCommands([WatchedDirectory(workplace.root / "watched")], parallel)
    specs = load_task_file(workplace.root / "first.yaml")
    registry.register(open_tasks(specs, info, files, reporter.say))
    ran: list[list[str]] = []
    end = time.monotonic() + LIMIT_S
    while not ran or (len(ran[-1]) == 1 and parallel.most([time.monotonic()])[0] < end):
        if len(ran) == 2 and parallel.rank == 0:
            task_file(workplace, "second").rename(workplace.root / "watched" / "second.yaml")
        # As the loop does: nobody takes the data in before all ranks are done with them.
        registry.follow(watched.poll(), parallel.most([float(registry.preparing)])[0] > 0)
        ran.append(sorted(engine.step()))
    registry.close()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (len(started), ran, reporter.said))
    (own, one, said), (others, two, _) = everyone
    assert (own, others) == (1, 0), "processes that tokenise"
    assert one == two and one[-1] == ["first", "second"], said
    assert len(one) > 3, "the other task trained meanwhile"
