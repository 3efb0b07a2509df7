"""Messages of tensor ranks as a benchmark sees them: logged, left out, sent by themselves, timed."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.exchange import Course, Exchange, PendingResult, interleave
from megatron_mux.backbone.pieces import Message
from megatron_mux.engine import interleaved

Sent = tuple[int, torch.dtype]
"""Elements and data type of a message."""


class _Done:
    """A message that was left out."""

    def wait(self) -> None:
        """Nothing is on its way."""


@contextmanager
def watched(tensor_group: dist.ProcessGroup, left_out: bool = False) -> Iterator[list[Sent]]:
    """Context that logs all sums over a group, in the order in which this process begins them.

    Args:
        tensor_group: The group.
        left_out: Send nothing: what is computed takes as long, but comes out wrong.
    """
    log: list[Sent] = []
    original = dist.all_reduce

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is tensor_group:
            log.append((tensor.numel(), tensor.dtype))
            if left_out:
                return _Done() if async_op else None
        return original(tensor, op, group, async_op)

    dist.all_reduce = all_reduce
    try:
        yield log
    finally:
        dist.all_reduce = original


def tensors_of(log: Sequence[Sent]) -> list[Tensor]:
    """Tensors to send like those of a log, in memory that the system has given already."""
    return [torch.empty(size, dtype=dtype).fill_(0.0) for size, dtype in log]


def send_alone(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[float]:
    """Send tensors one after another; returns the seconds of each."""
    seconds = []
    for tensor in tensors:
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        seconds.append(time.perf_counter() - start)
    return seconds


class Beside:
    """Computes products on a thread as long as the context lasts.

    Attributes:
        rate: Products per second.
    """

    def __init__(self) -> None:
        self._x, self._weight = torch.randn(256, 768), torch.randn(1024, 768)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._compute)
        self.rate = 0.0

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _compute(self) -> None:
        start, done = time.perf_counter(), 0
        while not self._ended.is_set():
            torch.mm(self._x, self._weight.t())
            done += 1
        self.rate = done / (time.perf_counter() - start)


def seconds_by_size(log: Sequence[Sent], rounds: Sequence[Sequence[float]]) -> dict[Sent, float]:
    """The median seconds of messages of each size, from several rounds of `send_alone`."""
    found: dict[Sent, list[float]] = {}
    for seconds in rounds:
        for sent, own in zip(log, seconds, strict=True):
            found.setdefault(sent, []).append(own)
    return {sent: statistics.median(own) for sent, own in found.items()}


@dataclass(frozen=True)
class TimedPiece:
    """A piece as it was computed.

    Attributes:
        chain: Index of its hybrid task.
        start, end: Of the computation, on the host's clock.
        message: Elements and data type of the message after it; None: there is none.
    """

    chain: int
    start: float
    end: float
    message: Sent | None

    @property
    def seconds(self) -> float:
        """Of the computation."""
        return self.end - self.start


@dataclass
class TimedPass:
    """One forward or backward pass of hybrid tasks in turns: an `Observer`.

    Attributes:
        pieces: In the order in which they were computed.
    """

    pieces: list[TimedPiece] = field(default_factory=list)
    _start: float = 0.0

    def begins(self, index: int) -> None:
        """A piece begins."""
        self._start = time.perf_counter()

    def ends(self, index: int) -> None:
        """It has been computed."""
        self.pieces.append(TimedPiece(index, self._start, time.perf_counter(), None))

    def issued(self, index: int, message: Message, pending: PendingResult) -> None:
        """It has a message."""
        sent = message.tensor.numel(), message.tensor.dtype
        self.pieces[-1] = replace(self.pieces[-1], message=sent)


@contextmanager
def timed_pieces() -> Iterator[list[TimedPass]]:
    """Context that times the pieces of hybrid tasks computed in turns."""
    passes: list[TimedPass] = []

    def timed(
        courses: Sequence[Course[Any]], order: Sequence[int], exchange: Exchange, observer: object = None
    ) -> list[Any]:
        passes.append(TimedPass())
        return interleave(courses, order, exchange, passes[-1])

    original = interleaved.interleave
    interleaved.interleave = timed
    try:
        yield passes
    finally:
        interleaved.interleave = original
