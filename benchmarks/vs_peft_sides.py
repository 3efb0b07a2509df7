"""Runs the sides of `vs_peft.py` in turns, each in a process of its own.

In one process the sides would share an allocator, and the time of each would depend on the memory that the others had
already mapped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mux_side
import peft_side
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from workload import LEARNING_RATE, Pair, TaskShape, mix_of, random_records

from megatron_mux.backbone.model import Backbone
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.runtime import Parallel, initialize
from tests.reference.records import Records

_IMPORTED = ("torch", "transformers", "peft", "megatron.core", "megatron_mux.engine")
"""What the server that forks new processes imports, once; nothing is computed in it."""

Step = Callable[[int], list[float]]
"""Runs the step of a given number and returns each task's loss."""

OURS = ("mux", "ceiling")
"""Our sides; they start after PEFT's, of which the first saves the initial adapters that all others load."""


class Setup:
    """Backbone, records and task specs of one measurement, the same in each process.

    Args:
        arguments: The script's flags.
        steps: Length of each task's learning rate schedule.
    """

    def __init__(self, arguments: argparse.Namespace, steps: int) -> None:
        torch.set_num_threads(arguments.threads)
        self.arguments = arguments
        self.device = torch.device("cpu")
        self.dtype = getattr(torch, arguments.dtype)
        self.steps = steps
        self.mix = mix_of(arguments.backbone_shape)
        self.specs = [mux_side.spec(shape, arguments.targets, steps, i) for i, shape in enumerate(self.mix)]
        self.records = [self._records(i, shape) for i, shape in enumerate(self.mix)]

    def _records(self, i: int, shape: TaskShape) -> TaskDataset:
        if self.arguments.data is not None and shape.records:
            tokenizer = load_tokenizer(self.arguments.backbone)
            return TaskDataset(self.arguments.data / shape.records, tokenizer, shape.max_length)
        from transformers import AutoConfig

        vocab = int(AutoConfig.from_pretrained(self.arguments.backbone, local_files_only=True).vocab_size)
        return Records(random_records(shape, shape.batch * self.steps, vocab, seed=i)).as_dataset()

    def parallel(self) -> Parallel:
        """Initialize a world of this process alone."""
        return initialize(device=self.device)

    def backbone(self, parallel: Parallel) -> Backbone:
        """Load the backbone into megatron-mux."""
        return Backbone.load(self.arguments.backbone, parallel, self.dtype)

    def examples(self, i: int) -> list[list[Pair]]:
        """Return the records of task `i` for each step."""
        return mux_side.examples(self.specs[i], self.records[i], self.steps)

    def peft_task(
        self, model: torch.nn.Module, i: int, rival: str, initial: dict[str, Tensor] | None = None
    ) -> peft_side.PeftTask:
        """Set up task `i` to be trained by PEFT."""
        targets, rank = self.arguments.targets, self.mix[i].rank
        return peft_side.PeftTask(model, rank, targets, LEARNING_RATE, self.steps, initial, rival)


@dataclass
class SideResult:
    """Times and losses of one side.

    Attributes:
        seconds: Time of each turn after the warm-up.
        losses: Loss of each task in each step, `[steps][tasks]`, including the warm-up.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)


def measure_sides(
    arguments: argparse.Namespace, steps: int, members: Sequence[int], scratch: Path
) -> dict[str, SideResult]:
    """Train some tasks of the mix on all sides, in turns; the side that goes first rotates from turn to turn.

    Args:
        arguments: The script's flags.
        steps: Length of each task's learning rate schedule.
        members: Indices of the tasks in the mix.
        scratch: Directory for the initial adapters, which all sides share.
    """
    names = (*arguments.rivals, *OURS)
    turns = {name: SideResult() for name in names}
    processes = {name: _new_process(_begin, name, arguments, steps, members, scratch) for name in names}

    def run(name: str, first: int, count: int) -> float:
        seconds, losses = processes[name].submit(_run_steps, first, count).result()
        turns[name].losses += losses
        return seconds

    try:
        for name in names:
            run(name, 0, arguments.warm_up)
        for turn, step in enumerate(range(arguments.warm_up, steps, arguments.steps)):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                turns[name].seconds.append(run(name, step, arguments.steps))
    finally:
        for process in processes.values():
            process.shutdown()
    return turns


def in_new_process(measure: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a new process, in which nothing has been computed."""
    with _new_process() as process:
        return process.submit(measure, *given).result()


def _new_process(begin: Callable[..., None] | None = None, *given: Any) -> ProcessPoolExecutor:
    """A process that a server forks, which has imported the libraries; it calls `begin` before anything else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    return ProcessPoolExecutor(1, context, begin, given)


_step: Step
"""In the process of a side: takes its steps."""


def _begin(
    name: str, arguments: argparse.Namespace, steps: int, members: Sequence[int], scratch: Path
) -> None:
    """Set up a side in its process."""
    global _step
    setup = Setup(arguments, steps)
    if name in peft_side.RIVALS:
        _step = _peft(name, setup, members, scratch)
    else:
        _step = {"mux": _mux, "ceiling": _ceiling}[name](setup, members, scratch)


def _run_steps(first: int, count: int) -> tuple[float, list[list[float]]]:
    """Run some steps in the process of a side; returns seconds and losses."""
    start = time.perf_counter()
    losses = [_step(number) for number in range(first, first + count)]
    return time.perf_counter() - start, losses


def _peft(rival: str, setup: Setup, members: Sequence[int], scratch: Path) -> Step:
    model = peft_side.load(setup.arguments.backbone, setup.dtype)
    tasks = []
    for i in members:
        initial = load_file(_initial(scratch, i)) if _initial(scratch, i).exists() else None
        tasks.append(setup.peft_task(peft_side.share_weights(model), i, rival, initial))
        if initial is None:
            save_file(tasks[-1].tensors(), _initial(scratch, i))
    examples = [setup.examples(i) for i in members]
    return lambda number: [float(task.step(own[number])) for task, own in zip(tasks, examples, strict=True)]


def _mux(setup: Setup, members: Sequence[int], scratch: Path) -> Step:
    parallel = setup.parallel()
    specs, records = [setup.specs[i] for i in members], [setup.records[i] for i in members]
    initial = [load_file(_initial(scratch, i)) for i in members]
    engine = mux_side.make_engine(setup.backbone(parallel), parallel, specs, records, initial)

    def step(_: int) -> list[float]:
        results = engine.step()
        return [results[spec.name].loss for spec in specs]

    return step


def _ceiling(setup: Setup, members: Sequence[int], scratch: Path) -> Step:
    ceiling = mux_side.Ceiling(setup.backbone(setup.parallel()))
    examples = [setup.examples(i) for i in members]
    return lambda step: [float(ceiling.step(ceiling.batch([task[step] for task in examples])))]


def _initial(scratch: Path, i: int) -> Path:
    return scratch / f"initial-{i}.safetensors"
