"""Instances are processes that outlive the server, and are found again by whoever comes after it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_mux.serve.executor import local
from megatron_mux.serve.executor.executor import Launch
from megatron_mux.serve.executor.local import LocalExecutor

PROGRAM = """
import subprocess, sys, time
print(sys.argv[1:], flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
time.sleep(60)
"""


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_instance_and_all_that_it_started_are_found_again_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    log = tmp_path / "log"
    handle = LocalExecutor(tmp_path).start(Launch("0.0", ["--flag"], 1, {}, log))
    monkeypatch.undo()
    until(lambda: log.exists() and "--flag" in log.read_text())
    assert "serve-instance" in log.read_text()
    until(lambda: len(list(local._processes(str(handle["mark"])))) == 2)
    another = LocalExecutor(tmp_path)  # the server was started again
    assert not another.exited(handle)
    another.stop(handle, kill=True)
    until(lambda: another.exited(handle))
    assert LocalExecutor(tmp_path / "elsewhere").exited({**handle, "mark": "other"})
