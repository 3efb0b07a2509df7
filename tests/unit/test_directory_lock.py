"""A directory has one writer; whoever died is found out, and whoever lost the directory writes no more."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_mux import directory_lock
from megatron_mux.directory_lock import LOCK, RECORD, DirectoryLock, Writer, refuse_if_held
from megatron_mux.errors import UserError

LONGEST_WAIT = directory_lock.PATIENCE_SECONDS + 2 * directory_lock.HEARTBEAT_SECONDS
FAR = Writer("far", "another machine", 7, 1, "someone", "pretrain_mux.py --save x", "2026-01-01", "abc")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", 0.6)
    monkeypatch.setattr(directory_lock, "_POLL_SECONDS", 0.02)


def write_lock(directory: Path, holder: Writer, beat: int = 1) -> None:
    """What a holder leaves."""
    (directory / LOCK).write_text(json.dumps({"heartbeat": f"{beat:012d}", **asdict(holder)}))


@contextmanager
def beating(directory: Path, holder: Writer) -> Iterator[None]:
    """A holder elsewhere that is alive."""
    ended = threading.Event()

    def beat() -> None:
        count = 1
        while not ended.wait(0.05):
            count += 1
            write_lock(directory, holder, count)

    write_lock(directory, holder)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def lost(lock: DirectoryLock) -> bool:
    try:
        lock.check()
    except UserError:
        return True
    return False


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 5
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()


def test_a_second_writer_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path / "run") as first, pytest.raises(UserError) as refused:
        DirectoryLock(tmp_path / "run").__enter__()
    message = str(refused.value)
    assert first.writer.host in message and f"process {os.getpid()}" in message and "--break-lock" in message


def test_a_look_before_slow_imports_refuses_only_a_living_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"{tmp_path}/megatron_mux/cli/__main__.py"
    monkeypatch.setattr("sys.argv", [module, "train", "a b.yaml", "--save", "runs/first"])
    refuse_if_held(tmp_path / "run")
    with DirectoryLock(tmp_path / "run"):
        said = r"process [0-9]+ of .*\(megatron-mux train 'a b.yaml' --save runs/first\)"
        with pytest.raises(UserError, match=said):
            refuse_if_held(tmp_path / "run")
        lock = tmp_path / "run" / LOCK
        held = json.loads(lock.read_text())
        dead = tmp_path / "dead"
        dead.mkdir()
        (dead / LOCK).write_text(json.dumps({**held, "started": 1}))
        refuse_if_held(dead)


def test_what_was_made_goes_if_nothing_was_written(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path / "runs" / "first"):
        assert (tmp_path / "runs" / "first" / LOCK).exists()
    assert not (tmp_path / "runs").exists()
    with DirectoryLock(tmp_path / "runs" / "first") as lock:
        lock.record(tasks=["a"])
    kept = json.loads((tmp_path / "runs" / "first" / RECORD).read_text())
    assert kept["pid"] == os.getpid() and kept["tasks"] == ["a"] and kept["command"]
    assert not (tmp_path / "runs" / "first" / LOCK).exists()


@pytest.mark.parametrize("how", ["gone", "number used again", "not reaped"])
def test_a_dead_process_of_this_host_does_not_hold_the_lock(tmp_path: Path, how: str) -> None:
    writer = Writer.this_process()
    child = os.fork()
    if child == 0:
        os._exit(0)
    if how != "not reaped":
        os.waitpid(child, 0)
    # A child that ended but was not waited for still has an entry among the processes, and its start.
    stat = Path(f"/proc/{child}/stat")
    wait_for(lambda: how != "not reaped" or " Z " in stat.read_text())
    started = int(stat.read_text().split()[21]) if how == "not reaped" else writer.started + 1
    pid = os.getpid() if how == "number used again" else child
    write_lock(tmp_path, replace(writer, pid=pid, started=started, nonce="dead"))
    began = time.monotonic()
    said: list[str] = []
    with DirectoryLock(tmp_path, say=said.append) as lock:
        lock.check()
    assert time.monotonic() - began < directory_lock.PATIENCE_SECONDS  # at once
    assert "died" in said[0]
    if how == "not reaped":
        os.waitpid(child, 0)


def test_a_silent_holder_on_another_host_is_waited_for_then_replaced(tmp_path: Path) -> None:
    write_lock(tmp_path, FAR)
    said: list[str] = []
    with DirectoryLock(tmp_path, say=said.append) as lock:
        lock.check()
    assert "on far" in said[0] and "--break-lock" in said[0]


def test_a_living_holder_on_another_host_is_respected(tmp_path: Path) -> None:
    with beating(tmp_path, FAR), pytest.raises(UserError, match="process 7 of someone on far"):
        DirectoryLock(tmp_path).__enter__()


def test_a_start_waits_for_less_than_a_minute() -> None:
    assert LONGEST_WAIT < 60


def test_a_process_that_proc_hides_is_taken_for_one_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = replace(Writer.this_process(), pid=os.getppid(), started=1, nonce="hidden")
    monkeypatch.setattr(directory_lock, "_start_ticks", lambda pid: 0)
    with beating(tmp_path, hidden), pytest.raises(UserError, match="is being written by"):
        DirectoryLock(tmp_path).__enter__()
    with DirectoryLock(tmp_path) as lock:  # its heartbeats have ended
        lock.check()


def test_a_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match="No space left"):
            DirectoryLock(tmp_path / "run").__enter__()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"heartbeat": "1"}'])
def test_a_damaged_lock_is_watched_then_removed(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with DirectoryLock(tmp_path) as lock:
        lock.check()


def test_a_broken_lock_ends_the_one_that_held_it(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as first:
        with DirectoryLock(tmp_path, break_lock=True) as second:
            with pytest.raises(UserError, match=r"taken over by process .* writes no more there"):
                first.check()
            second.check()
        assert not (tmp_path / LOCK).exists()
        with pytest.raises(UserError):  # it does not get it back either
            first.check()


def test_a_successor_that_has_finished_is_noticed(tmp_path: Path) -> None:
    """Its lock is gone, as if a user had deleted this process's."""
    with DirectoryLock(tmp_path) as first:
        first.record()
        with DirectoryLock(tmp_path, break_lock=True) as second:
            second.record()
        assert lost(first)


def test_leaving_spares_the_lock_of_a_successor(tmp_path: Path) -> None:
    first = DirectoryLock(tmp_path).__enter__()
    with DirectoryLock(tmp_path, break_lock=True) as second:
        first.__exit__(None, None, None)
        second.check()


def test_a_lock_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as lock:
        (tmp_path / LOCK).unlink()
        wait_for((tmp_path / LOCK).exists)
        lock.check()
        with pytest.raises(UserError):
            DirectoryLock(tmp_path).__enter__()


def test_of_many_that_find_a_dead_holder_one_gets_the_lock(tmp_path: Path) -> None:
    for turn in range(10):
        directory = tmp_path / str(turn)
        directory.mkdir()
        write_lock(directory, replace(Writer.this_process(), started=1, nonce="dead"))
        barrier = threading.Barrier(6)
        held: list[DirectoryLock] = []

        def start(directory: Path = directory, barrier: threading.Barrier = barrier) -> None:
            lock = DirectoryLock(directory)
            barrier.wait()
            with suppress(UserError):
                held.append(lock.__enter__())  # noqa: B023

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(not lost(lock) for lock in held) == 1
        for lock in held:
            lock.__exit__(None, None, None)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--save .*file/run: cannot be written"):
        DirectoryLock(tmp_path / "file" / "run").__enter__()
