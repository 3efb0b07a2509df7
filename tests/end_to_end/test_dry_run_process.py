"""Whatever happens to a dry run, nobody waits for it and no process is left of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_mux.dry_run import process
from megatron_mux.dry_run.process import dry_runs, prepare
from megatron_mux.memory import worker
from megatron_mux.memory.worker import Worker, WorkerError
from tests.end_to_end.test_dry_run import _run


def _text(path: Path) -> str:
    """A file of /proc; empty if its thread or process has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process that other tests of this session keep; with real children, which warm ones are not."""
    process.end_worker()
    monkeypatch.setattr(worker, "sys", sys)


def _children(of: int) -> list[int]:
    return [int(pid) for pid in _text(Path(f"/proc/{of}/task/{of}/children")).split()]


def _workers() -> list[int]:
    return [
        pid
        for thread in Path("/proc/self/task").iterdir()
        for pid in map(int, _text(thread / "children").split())
        if "megatron_mux.memory.worker" in _text(Path(f"/proc/{pid}/cmdline"))
    ]


def _forks() -> Iterator[int]:
    for pid in _workers():
        yield from _children(pid)


def _first_fork(seconds: float = 90) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for pid in _forks():
            return pid
        time.sleep(0.05)
    raise AssertionError("no process was forked")


def _is_there(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and ") Z " not in status.read_text()


def test_a_killed_rank_is_told_and_an_interrupt_or_the_time_limit_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = [(_run(200), 0), (_run(201), 0)]  # a minute's work

    def kill() -> None:
        os.kill(_first_fork(), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerError, match="lost"):
        dry_runs(deep, whole=True)
    killer.join()
    assert not _workers()

    seen: list[int] = []

    def interrupt() -> None:
        seen.append(_first_fork())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        dry_runs(deep, whole=True)
    interrupter.join()
    _gone(seen)

    with pytest.raises(WorkerError, match=r"longer than 0\.5 s"):
        dry_runs(deep, whole=True, seconds=0.5)
    assert not _workers()
    assert process._SECONDS > 60


def _gone(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while any(map(_is_there, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_is_there, pids)) and not _workers()


def test_a_process_that_was_prepared_runs_one_after_another() -> None:
    with Worker(120) as own:
        prepare(own)
        assert own.submit(eval, "'megatron.core.models.gpt' in __import__('sys').modules").result()
        (first,) = dry_runs([(_run(1), 0)], worker=own)
        mine = _workers()
        (second,) = dry_runs([(_run(2), 0)], worker=own)
        assert len(mine) == 1 and mine == _workers()
        assert len(second.stream) > len(first.stream)
    assert not _workers()
