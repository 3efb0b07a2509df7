"""Processes of PEFT on one GPU at once, each with its own copy of the backbone and one task: a rival of `gpu_table.py`.

They start before anything is measured, import while the first process does, and wait, so that their imports disturb
nothing. No process has initialised CUDA when it starts another.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

MEASURED = 8
"""Steps of each process that are timed together, or as many as the row's burst has, if those are more."""


class Processes:
    """Processes that wait for rows to measure.

    Args:
        count: Their number.
        threads: Of each.
    """

    def __init__(self, count: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._own: list[tuple[Any, Connection]] = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, threads), daemon=True)
            process.start()
            there.close()
            self._own.append((process, here))

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._own)

    def wait(self, seconds: float = 120) -> None:
        """Wait until all have imported.

        Raises:
            RuntimeError: One failed or takes too long; all are ended.
        """
        self._answers(self._own, time.monotonic() + seconds)

    def measure(self, row: Any, head: str, device: str, dtype: str, seconds: float) -> dict[str, Any]:
        """Train each task of a row in a process of its own, all at once.

        Args:
            row: The row; there is a process for each of its tasks.
            head: Of PEFT's loss.
            device, dtype: Where, and of the backbone.
            seconds: The processes are ended when they take longer.

        Returns:
            `tokens_per_second` of all processes together, from the first start to the last end.

        Raises:
            RuntimeError: A process failed or takes too long; all are ended.
        """
        end = time.monotonic() + seconds
        own = self._own[: len(row.mix)]
        for i, (_, connection) in enumerate(own):
            connection.send((row, i, head, device, dtype))
        self._answers(own, end)  # ready
        for _, connection in own:
            connection.send("go")
        found = self._answers(own, end)
        took = max(stop for _, stop, _ in found) - min(start for start, _, _ in found)
        tokens = sum(count for _, _, count in found)
        return {"tokens_per_second": tokens / took, "seconds": took, "tokens": tokens, "processes": len(own)}

    def _answers(self, own: Sequence[tuple[Any, Connection]], end: float) -> list[Any]:
        answers: list[Any] = []
        for _, connection in own:
            try:
                answer = connection.recv() if connection.poll(max(0, end - time.monotonic())) else "too slow"
            except EOFError:
                answer = "a process ended"
            if isinstance(answer, str):
                self.end()
                raise RuntimeError(answer)
            answers.append(answer)
        return answers

    def end(self) -> None:
        """End all processes."""
        for process, connection in self._own:
            connection.close()
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
        self._own = []


def _serve(connection: Connection, threads: int) -> None:
    """Main function of a process: import, then measure a task of each row that arrives."""
    import gpu_sides
    import torch

    torch.set_num_threads(threads)
    connection.send(True)
    try:
        while True:
            row, i, head, device, dtype = connection.recv()
            one = _one_task(row, i, head, torch.device(device), getattr(torch, dtype))
            connection.send(True)
            connection.recv()
            connection.send(one())
            del one
            gpu_sides.empty_allocator(torch.device(device))
    except EOFError:
        pass
    except Exception:  # the parent reports it
        connection.send(traceback.format_exc())


def _one_task(row: Any, i: int, head: str, device: Any, dtype: Any) -> Any:
    """Set up one task of a row and warm it up; returns what times it: its start, its end and its tokens."""
    import gpu_sides
    import peft_side
    import random_model

    work = gpu_sides.Work(row, [i])
    model = random_model.make(
        row.shape, row.layers, dtype, device, peft_side.attention_of("packed", dtype, device)
    )
    if row.quantise is not None:
        model = random_model.quantised_copy(model)
    tasks = gpu_sides.peft_tasks(work, peft_side.prepared(model), "packed")
    tasks[0].head = head
    meter = gpu_sides.Meter(work, device, gpu_sides.peft_burst(work, tasks))
    meter.warm_up()

    def timed() -> tuple[float, float, int]:
        start = time.time()
        _, tokens, _ = meter.run(max(MEASURED, row.burst))
        return start, time.time(), tokens

    return timed
