"""Processes of PEFT on one GPU at once, each with its own copy of the backbone and one task: a rival of `gpu_table.py`.

They start before anything is measured, and import while nothing is, so that their imports disturb nothing. No process
has initialised CUDA when it starts another.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
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
        self._pools = [ProcessPoolExecutor(1, context, _import, (threads,)) for _ in range(count)]
        self._started = [pool.submit(int) for pool in self._pools]

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._pools)

    def wait(self, seconds: float = 120) -> None:
        """Wait until all have imported; raises what one of them raised, or that it takes too long."""
        self._results(self._started, time.monotonic() + seconds)

    def measure(self, row: Any, head: str, device: str, dtype: str, seconds: float) -> dict[str, Any]:
        """Train each task of a row in a process of its own, all at once.

        Args:
            row: The row; there is a process for each of its tasks.
            head: Of PEFT's loss.
            device, dtype: Where, and of the backbone.
            seconds: The processes are ended when they take longer.

        Returns:
            `tokens_per_second` of all processes together, from the first start to the last end.
        """
        end, own = time.monotonic() + seconds, self._pools[: len(row.mix)]
        given = (head, device, dtype)
        self._results([pool.submit(_set_up, row, i, *given) for i, pool in enumerate(own)], end)
        found = self._results([pool.submit(_train) for pool in own], end)
        took = max(stop for _, stop, _ in found) - min(start for start, _, _ in found)
        tokens = sum(count for _, _, count in found)
        return {"tokens_per_second": tokens / took, "seconds": took, "tokens": tokens, "processes": len(own)}

    def _results(self, futures: Sequence[Future[Any]], end: float) -> list[Any]:
        try:
            return [future.result(max(0.0, end - time.monotonic())) for future in futures]
        except Exception:
            self.end()
            raise

    def end(self) -> None:
        """End all processes, whatever they do."""
        if self._pools:
            for process in multiprocessing.active_children():
                process.kill()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        self._pools = []


def _import(threads: int) -> None:
    """The first that a process does."""
    import gpu_sides  # noqa: F401  # takes seconds
    import torch

    torch.set_num_threads(threads)


_meter: Any = None
"""Times the task that `_set_up` has made in this process."""


def _set_up(row: Any, i: int, head: str, device_name: str, dtype_name: str) -> None:
    """Set up one task of a row in this process and warm it up."""
    global _meter
    import gpu_sides
    import peft_side
    import random_model
    import torch

    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    attention = peft_side.attention_of("packed", dtype, device)
    model = random_model.make(row.shape, row.layers, dtype, device, attention)
    if row.quantise is not None:
        model = random_model.quantised_copy(model)
    work = gpu_sides.Work(row, [i])
    tasks = gpu_sides.peft_tasks(work, peft_side.prepared(model), "packed")
    tasks[0].head = head
    _meter = gpu_sides.Meter(work, device, gpu_sides.peft_burst(work, tasks))
    _meter.warm_up()


def _train() -> tuple[float, float, int]:
    """Train it, and return its memory; returns its start, its end and its tokens."""
    global _meter
    import gpu_sides

    start = time.time()
    _, tokens, _ = _meter.run(max(MEASURED, _meter.work.row.burst))
    stop = time.time()
    device, _meter = _meter.device, None
    gpu_sides.empty_allocator(device)
    return start, stop, tokens
