"""What waits for a receive that nobody answers, on one GPU: the rules that `tests/unit/pipeline/nccl.py` plays.

A kernel that spins on a flag in pinned memory stands in for the receive. `make gpu-check` runs this; elsewhere it is
skipped. What is played as not waiting must not wait here: else a pipeline could hang on NCCL. What is played as waiting
may turn out not to wait: that is reported, and harms nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.gpu.needs_gpu import NEEDS_GPU

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = NEEDS_GPU

PATIENCE = 1.0
"""Seconds after which something is taken to wait for the receive."""

MOST_TURNS = 1 << 22
"""The kernel gives up after so many looks at the flag, about a microsecond each: no test waits longer than that."""


@triton.jit
def _spin(flag, seen, most):  # type: ignore[no-untyped-def]
    value = tl.load(flag, volatile=True)
    turns = 0
    while (value == 0) & (turns < most):
        value = tl.load(flag, volatile=True)
        turns += 1
    tl.store(seen, value)


class Receive:
    """A receive on a stream of its own; `answer` lets it end."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.seen = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._flag = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._launch()  # loads the kernel
        torch.cuda.synchronize()

    def post(self) -> torch.cuda.Event:
        """Launch it; returns the event of its end."""
        self._flag.zero_()
        self._launch()
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def answer(self) -> None:
        """Let it end, and everything that waits for it."""
        self._flag.fill_(1)
        torch.cuda.synchronize()
        assert self.seen.item() == 1, "it gave up before it was answered"

    def _launch(self) -> None:
        with torch.cuda.stream(self.stream):
            _spin[(1,)](self._flag, self.seen, MOST_TURNS)


@pytest.fixture
def receive() -> Iterator[Receive]:
    made = Receive()
    yield made
    torch.cuda.synchronize()


def waits(receive: Receive, work: Callable[[], object]) -> bool:
    """Whether the host does not get through `work` before the receive is answered."""
    with ThreadPoolExecutor(1) as thread:
        receive.post()
        done = thread.submit(work)
        has_waited = not futures.wait([done], PATIENCE).done
        receive.answer()
        done.result()
    return has_waited


def is_done_soon(event: torch.cuda.Event) -> bool:
    """Whether what an event was recorded after is done before long, with the receive still there."""
    deadline = time.monotonic() + PATIENCE
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(event.query())


def _matrix() -> Tensor:
    return torch.ones(256, 256, device="cuda")


def test_what_a_step_does_waits_for_no_receive(receive: Receive) -> None:
    """Loaded kernels, cached memory, pinned buffers, events, and a blocking copy of the computing stream."""
    x, host = _matrix(), torch.ones(256, 256, pin_memory=True)
    for _ in range(2):  # kernels are loaded, memory is cached
        (x @ x).sum().item()
        x.copy_(host, non_blocking=True)

    def compute() -> None:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        x.copy_(host, non_blocking=True)
        total = (x @ x).sum()
        stop.record()
        assert total.item() == 256**3
        stop.synchronize()
        assert start.elapsed_time(stop) >= 0

    assert not waits(receive, compute)


def test_only_what_awaits_a_receive_is_held_up(receive: Receive) -> None:
    x, side = _matrix(), torch.cuda.Stream()
    (x @ x).sum().item()
    with torch.cuda.stream(side):
        (x @ x).sum().item()
    came = receive.post()
    awaiting, free = torch.cuda.Event(), torch.cuda.Event()
    side.wait_event(came)
    with torch.cuda.stream(side):
        x @ x
        awaiting.record(side)
    x @ x
    free.record()
    is_free, is_held = is_done_soon(free), not awaiting.query()
    receive.answer()
    assert is_free and is_held and awaiting.query()


def test_device_waits_wait_for_a_receive(receive: Receive) -> None:
    assert waits(receive, torch.cuda.synchronize)
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del block  # it stays in the cache
    assert waits(receive, torch.cuda.empty_cache)
