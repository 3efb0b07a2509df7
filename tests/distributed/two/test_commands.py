"""Two ranks follow the commands of the first one: both pause a task before the same step, and let it go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_mux.backbone.model import load_stages
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Engine, Planning
from megatron_mux.errors import SharedError
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import load_task_file
from megatron_mux.training.commands import Cancel, Command, CommandQueue, Pause, Resume, SharedCommands
from megatron_mux.training.task_registry import TaskRegistry
from megatron_mux.training.task_setup import open_tasks
from tests.end_to_end.harness import assert_close
from tests.end_to_end.workplace import Workplace, furnish
from tests.unit.training.test_task_registry import Reporter


def finished(
    workplace: Workplace, parallel: Parallel, commands: dict[int, Command]
) -> tuple[list[list[str]], dict[str, Any], list[str]]:
    """Train the tasks; returns who took each step, adapters on rank 0, and what was said.

    Args:
        workplace: Where the tasks are.
        parallel: This rank's place.
        commands: Commands by the number of steps before them; rank 0 is told them, the other one something else.
    """
    stages = load_stages(workplace.backbone, parallel, torch.float64)
    engine, info = Engine(stages, parallel, Planning("temporal", parallel.pp_size)), stages[0].info
    reporter: Any = Reporter()
    files = DataFiles(load_tokenizer(workplace.backbone), reporter.say)
    registry = TaskRegistry(engine, parallel, reporter, info, files, callbacks=[])
    registry.register(open_tasks(load_task_file(workplace.tasks), info, files, reporter.say))
    queue = CommandQueue()
    source = SharedCommands([queue], parallel)
    ran: list[list[str]] = []
    while engine.active:
        if len(ran) in commands:
            queue.put(commands[len(ran)] if parallel.rank == 0 else Cancel("diff"))
        registry.follow(source.poll(), preparing=False)
        ran.append(sorted(engine.step()))
    tensors = {name: engine.adapter_tensors(name) for name in engine.tasks}
    registry.close()
    engine.close()
    for name in engine.tasks:
        engine.remove_task(name)
    return ran, tensors, reporter.said


def test_both_ranks_pause_a_task_before_the_same_step(
    once: Callable[[str, Callable[[Path], Any]], Path], joined: Callable[..., Parallel]
) -> None:
    workplace, parallel = Workplace(once("commands", furnish)), joined(1, 2)
    ran, tensors, said = finished(
        workplace, parallel, {2: Pause("lora"), 3: Cancel("prefix"), 6: Resume("lora")}
    )
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (ran, said))
    assert everyone[0] == everyone[1]
    assert [step for step, names in enumerate(ran) if "lora" not in names] == [2, 3, 4, 5]
    assert [names for names in ran if "prefix" in names] == ran[:3] and len(ran) == 14 + 4
    assert sum("diff" in names for names in ran) == 12, "the other rank's commands are nobody's"
    _, wanted, _ = finished(workplace, parallel, {})
    for name in ("lora", "diff") if parallel.rank == 0 else ():
        assert_close(tensors[name], wanted[name], 1e-9, name)  # who shares a step may change how it rounds


def test_a_source_that_fails_ends_both_ranks(joined: Callable[..., Parallel]) -> None:
    parallel = joined(1, 1)

    class Broken:
        awaited = ""

        def poll(self) -> Sequence[Command]:
            raise ZeroDivisionError("a bug of whoever commands")

    with pytest.raises(ZeroDivisionError if parallel.rank == 0 else SharedError, match="a bug"):
        SharedCommands([Broken()], parallel).poll()
