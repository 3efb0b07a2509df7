"""Each side in a process of its own, as its users run it, one of them at work at a time.

Within one process they would share an allocator: which of them finds its memory mapped already then depends on what
ran before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mux_side
import peft_side
from bench import Bench
from safetensors.torch import load_file, save_file

Step = Callable[[int], list[float]]
"""Runs one step, given its number; returns each task's loss."""

SIDES = ("peft", "mux", "ceiling")
"""In the order in which they are made: PEFT's leaves the adapters that megatron-mux starts from."""


@dataclass
class Turns:
    """What a side took and gave.

    Attributes:
        seconds: Of every counted turn.
        losses: Of every step, those of the warm-up included, and within it of every task.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)


def take_turns(
    arguments: argparse.Namespace, steps: int, members: Sequence[int], scratch: Path
) -> dict[str, Turns]:
    """Let all sides train these tasks of the mix, turn by turn; who goes first changes from turn to turn.

    Args:
        arguments: The script's flags.
        steps: Steps of every task in all.
        members: Indices of the tasks.
        scratch: A directory to pass tensors through.
    """
    sides = {name: _Process(name, arguments, steps, members, scratch) for name in SIDES}
    turns = {name: Turns() for name in SIDES}
    try:
        for name, side in sides.items():
            turns[name].losses += side.take(0, arguments.warm_up)[1]
        step = arguments.warm_up
        for turn in range(arguments.repeats):
            first = turn % len(SIDES)
            for name in SIDES[first:] + SIDES[:first]:
                seconds, losses = sides[name].take(step, arguments.steps)
                turns[name].seconds.append(seconds)
                turns[name].losses += losses
            step += arguments.steps
    finally:
        for side in sides.values():
            side.end()
    return turns


class _Process:
    """The parent's end of a side: made when it is ready to work."""

    def __init__(
        self, name: str, arguments: argparse.Namespace, steps: int, members: Sequence[int], scratch: Path
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, name, arguments, steps, list(members), scratch), daemon=True
        )
        self.process.start()
        theirs.close()
        self._receive()

    def take(self, first: int, count: int) -> tuple[float, list[list[float]]]:
        """Steps `first` to `first + count`: seconds and losses."""
        self.connection.send((first, count))
        seconds, losses = self._receive()
        return seconds, losses

    def end(self) -> None:
        """Close the connection, which the process takes for the end."""
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


def _work(
    connection: Connection,
    name: str,
    arguments: argparse.Namespace,
    steps: int,
    members: list[int],
    scratch: Path,
) -> None:
    """The side's process: says when it is ready, then answers each demand for steps."""
    try:
        bench = Bench(arguments, steps)
        step = {"peft": _peft, "mux": _mux, "ceiling": _ceiling}[name](bench, members, scratch)
        connection.send(None)
        while True:
            first, count = connection.recv()
            bench.synchronize()
            start = time.perf_counter()
            losses = [step(k) for k in range(first, first + count)]
            bench.synchronize()
            connection.send((time.perf_counter() - start, losses))
    except EOFError:
        pass
    except Exception:  # whatever it is, the parent tells it
        connection.send(traceback.format_exc())


def _peft(bench: Bench, members: Sequence[int], scratch: Path) -> Step:
    model = peft_side.load(bench.arguments.backbone, bench.dtype, bench.device)
    tasks = [bench.peft_task(peft_side.share_weights(model), i) for i in members]
    examples = [bench.examples(i) for i in members]
    for i, task in zip(members, tasks, strict=True):
        save_file(task.tensors(), _initial(scratch, i))
    return lambda step: [task.step(examples[k][step]) for k, task in enumerate(tasks)]


def _mux(bench: Bench, members: Sequence[int], scratch: Path) -> Step:
    parallel = bench.parallel()
    engine = mux_side.make_engine(
        bench.backbone(parallel),
        parallel,
        [bench.specs[i] for i in members],
        [bench.records[i] for i in members],
        [load_file(_initial(scratch, i)) for i in members],
    )

    def step(_: int) -> list[float]:
        results = engine.step()
        return [results[bench.mix[i].name].loss for i in members]

    return step


def _ceiling(bench: Bench, members: Sequence[int], scratch: Path) -> Step:
    ceiling = mux_side.Ceiling(bench.backbone(bench.parallel()), bench.device)
    examples = [bench.examples(i) for i in members]
    return lambda step: [ceiling.step([task[step] for task in examples])]


def _initial(scratch: Path, i: int) -> Path:
    return scratch / f"initial-{i}.safetensors"
