"""Runs the sides of `vs_peft.py` in turns, each in a process of its own.

In one process the sides would share an allocator, and the time of each would depend on the memory that the others had
already mapped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mux_side
import operator_profile
import peft_side
import torch
from safetensors.torch import load_file, save_file
from vs_peft_setup import Setup

from megatron_mux import runtime
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.tasks import TaskSpec

_IMPORTED = ("torch", "transformers", "peft", "megatron.core", "megatron_mux.engine")
"""What the server that forks new processes imports, once; nothing is computed in it."""

Step = Callable[[int], list[float]]
"""Runs the step of a given number and returns each task's loss."""

OURS = ("mux", "ceiling")
"""Our sides; they start after PEFT's, of which the first saves the initial adapters that all others load."""


@dataclass
class SideResult:
    """Times and losses of one side.

    Attributes:
        seconds: Time of each turn after the warm-up.
        losses: Loss of each task in each step, `[steps][tasks]`, including the warm-up.
        profile: By kind of operator, the `seconds` and `calls` of one more turn; empty if none was profiled.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    profile: dict[str, dict[str, float]] = field(default_factory=dict)


def measure_sides(
    arguments: argparse.Namespace, steps: int, members: Sequence[int], scratch: Path, profiled: bool
) -> dict[str, SideResult]:
    """Train some tasks of the mix on all sides, in turns; the side that goes first rotates from turn to turn.

    Args:
        arguments: The script's flags.
        steps: Length of each task's learning rate schedule.
        members: Indices of the tasks in the mix.
        scratch: Directory for the initial adapters, which all sides share.
        profiled: Profile one more turn of each side.

    Returns:
        Each side's times and losses.
    """
    names = (*arguments.rivals, *OURS)
    sides = {name: _SideProcess(name, arguments, steps, members, scratch) for name in names}
    turns = {name: SideResult() for name in names}
    try:
        for name, side in sides.items():
            turns[name].losses += side.run_steps(0, arguments.warm_up)[1]
        step = arguments.warm_up
        for turn in range(arguments.repeats):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                seconds, losses = sides[name].run_steps(step, arguments.steps)
                turns[name].seconds.append(seconds)
                turns[name].losses += losses
            step += arguments.steps
        if profiled:
            for name, side in sides.items():
                turns[name].profile = side.profile_steps(step, arguments.steps)
    finally:
        for side in sides.values():
            side.end()
    return turns


def in_new_process(
    measure: Callable[..., dict[str, int]], arguments: argparse.Namespace, *more: Any
) -> dict[str, int]:
    """Call a function in a new process, in which nothing has been computed."""
    with ProcessPoolExecutor(1, _context(arguments.device), max_tasks_per_child=1) as pool:
        return pool.submit(measure, arguments, *more).result()


def _context(device: str) -> Any:
    """How processes start: for a GPU each by itself, since a process cannot use CUDA if its parent has asked for it.

    On a CPU a server forks them, which has imported the libraries.
    """
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    return context


class _SideProcess:
    """The process of one side, as its parent controls it; ready to train when the constructor returns."""

    def __init__(
        self, name: str, arguments: argparse.Namespace, steps: int, members: Sequence[int], scratch: Path
    ) -> None:
        context = _context(arguments.device)
        self.name = name
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_run_side, args=(theirs, name, arguments, steps, list(members), scratch), daemon=True
        )
        self.process.start()
        theirs.close()
        self._receive()

    def run_steps(self, first: int, count: int) -> tuple[float, list[list[float]]]:
        """Run `count` steps from step `first` on; returns their seconds and losses."""
        self.connection.send((first, count, False))
        seconds, losses = self._receive()
        return seconds, losses

    def profile_steps(self, first: int, count: int) -> dict[str, dict[str, float]]:
        """Run `count` steps from step `first` on under the profiler; see `SideResult.profile`."""
        self.connection.send((first, count, True))
        found: dict[str, dict[str, float]] = self._receive()
        return found

    def end(self) -> None:
        """Close the connection, upon which the process exits."""
        self.connection.close()
        self.process.join(timeout=30)
        if self.process.is_alive():
            self.process.kill()

    def _receive(self) -> Any:
        try:
            answer = self.connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(
                f"the process of {self.name} ended with status {self.process.exitcode}"
            ) from None
        if isinstance(answer, str):
            raise RuntimeError(f"the process of {self.name} failed:\n{answer}")
        return answer


def _run_side(
    connection: Connection,
    name: str,
    arguments: argparse.Namespace,
    steps: int,
    members: list[int],
    scratch: Path,
) -> None:
    """Main function of a side's process: report that it is ready, then run the steps it is asked for."""
    try:
        setup = Setup(arguments, steps)
        step = {
            "padded": partial(_peft, "padded"),
            "packed": partial(_peft, "packed"),
            "zero-padded": _zero_padded,
            "mux": _mux,
            "ceiling": _ceiling,
        }[name](setup, members, scratch)
        connection.send(None)
        while True:
            connection.send(_run_steps(setup, step, *connection.recv()))
    except EOFError:
        pass
    except Exception:  # the parent reports it
        connection.send(traceback.format_exc())
    finally:
        runtime.shutdown()


def _run_steps(setup: Setup, step: Step, first: int, count: int, profiled: bool) -> Any:
    """Run some steps: their seconds and losses, or what the profiler found."""

    def run() -> list[list[float]]:
        losses = [step(k) for k in range(first, first + count)]
        setup.synchronize()
        return losses

    setup.synchronize()
    if profiled:
        return operator_profile.profile_by_kind(run, setup.device)
    start = time.perf_counter()
    losses = run()
    return time.perf_counter() - start, losses


def _peft(rival: str, setup: Setup, members: Sequence[int], scratch: Path) -> Step:
    model = peft_side.load(setup.arguments.backbone, setup.dtype, setup.device, rival)
    tasks = []
    for i in members:
        initial = load_file(_initial(scratch, i)) if _initial(scratch, i).exists() else None
        tasks.append(setup.peft_task(peft_side.share_weights(model), i, rival, initial))
        if initial is None:
            save_file(tasks[-1].tensors(), _initial(scratch, i))
    examples = [setup.examples(i) for i in members]

    def step(number: int) -> list[float]:
        # Read at the step's end only: no task waits for the device.
        losses = [task.step(examples[k][number]) for k, task in enumerate(tasks)]
        return [float(loss) for loss in torch.stack(losses).tolist()]

    return step


def _mux(setup: Setup, members: Sequence[int], scratch: Path) -> Step:
    return _engine(
        setup, [setup.specs[i] for i in members], [setup.records[i] for i in members], members, scratch
    )


def _zero_padded(setup: Setup, members: Sequence[int], scratch: Path) -> Step:
    return _engine(setup, *setup.zero_padded(members), members, scratch)


def _engine(
    setup: Setup,
    specs: Sequence[TaskSpec],
    records: Sequence[TaskDataset],
    members: Sequence[int],
    scratch: Path,
) -> Step:
    parallel = setup.parallel()
    initial = [load_file(_initial(scratch, i)) for i in members]
    engine = mux_side.make_engine(setup.backbone(parallel), parallel, specs, records, initial)

    def step(_: int) -> list[float]:
        results = engine.step()
        return [results[setup.mix[i].name].loss for i in members]

    return step


def _ceiling(setup: Setup, members: Sequence[int], scratch: Path) -> Step:
    ceiling = mux_side.Ceiling(setup.backbone(setup.parallel()), setup.device)
    examples = [setup.examples(i) for i in members]
    return lambda step: [float(ceiling.step(ceiling.batch([task[step] for task in examples])))]


def _initial(scratch: Path, i: int) -> Path:
    return scratch / f"initial-{i}.safetensors"
