"""A process that is forked from the server of warm processes behaves as `python` would."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.forked import Server

SHOWS = """
import os, sys
print(sys.argv[1:], os.environ["GIVEN"], os.getcwd(), sys.stdin.read(), "torch" in sys.modules)
print("to errors", file=sys.stderr)
sys.exit(5)
"""


def test_it_has_arguments_environment_streams_directory_and_status(server: Server, tmp_path: Path) -> None:
    done = subprocess.run(
        [server.python, "-c", SHOWS, "a", "b"],
        cwd=tmp_path,
        env={**os.environ, "GIVEN": "here"},
        input="read",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"['a', 'b'] here {tmp_path} read True\n"
    assert (done.stderr, done.returncode) == ("to errors\n", 5)


def test_an_error_is_printed_as_python_does(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('no')")
    done = subprocess.run([server.python, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: no\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_gets_signals_and_ends_with_who_started_it(
    number: signal.Signals, server: Server, tmp_path: Path
) -> None:
    told = tmp_path / "pid"
    code = (
        f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    process = subprocess.Popen([server.python, "-c", code])
    while not told.exists() or not told.read_text():
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=30) == -number
    forked, end = Path("/proc") / told.read_text(), time.monotonic() + 30
    while forked.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not forked.exists()
