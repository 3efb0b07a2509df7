"""Calls in a process of its own: results, mistakes, and processes that are lost."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest

from megatron_mux.errors import UserError
from megatron_mux.memory.worker import LostProcess, Worker, WorkerError


def _refuse(*problems: str) -> None:
    raise UserError(*problems)


def test_calls_are_answered_in_order_and_without_a_gpu() -> None:
    with Worker() as worker:
        worker.start("json")
        pid, visible = worker.submit(os.getpid), worker.submit(os.getenv, "CUDA_VISIBLE_DEVICES")
        assert pid.result() == worker.submit(os.getpid).result() != os.getpid() and visible.result() == ""
    with pytest.raises(ProcessLookupError):
        while True:  # until its parent has noticed: here that is not this process
            os.kill(pid.result(), 0)


def test_what_a_function_raises_is_raised() -> None:
    with Worker() as worker:
        with pytest.raises(UserError) as refused:
            worker.submit(_refuse, "one", "two").result()
        assert refused.value.problems == ["one", "two"]
        with pytest.raises(WorkerError, match="ValueError: math domain error"):
            worker.submit(math.sqrt, -1).result()
        assert worker.submit(math.sqrt, 4).result() == 2


def test_a_lost_process_is_told_and_other_calls_have_another() -> None:
    with Worker() as worker:
        pid = worker.submit(os.getpid).result()
        sleeping, waiting = worker.submit(time.sleep, 60), worker.submit(os.getpid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LostProcess, match="ended by SIGKILL"):
            sleeping.result()
        assert waiting.result() == worker.submit(os.getpid).result() != pid
        worker.submit(print, "the last word").result()
        with pytest.raises(WorkerError, match=r"^the last word$"):
            worker.submit(os._exit, 3).result()


def test_nobody_waits_longer_than_the_limit_or_after_the_end() -> None:
    begun = time.monotonic()
    with Worker(seconds=0.2) as worker, pytest.raises(WorkerError, match=r"longer than 0\.2 s"):
        worker.submit(time.sleep, 60).result()
    with Worker() as worker:
        worker.submit(time.sleep, 60)
        worker.submit(time.sleep, 60)
    assert time.monotonic() - begun < 20
