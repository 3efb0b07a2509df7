"""The live display of a run on a terminal: rows of all tasks at any time, and what does and does not get through it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path
from typing import Any

from tests.end_to_end.forked import ROOT, Server
from tests.end_to_end.workplace import TASKS, furnish

COLUMNS = 80
NAMES = ["movie-sentiment", "dialogue", "glosses", "austen", "support-tickets"]

# Runs `pretrain_mux.py`; libraries complain while a step is computed, in each of the ways they have.
DRIVER = """
import logging, os, pathlib, shutil, signal, sys, threading, time, warnings
from megatron_mux.data.background import BackgroundTokenising
from megatron_mux.engine import Engine
from megatron_mux.training import run
import pretrain_mux

watched, joins, what = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
real, poll, load, steps = Engine.steps, BackgroundTokenising.poll, run.load_stages, 0

def slowly(*arguments, **named):
    time.sleep(1)  # the display is drawn meanwhile
    return load(*arguments, **named)

def wait(self):
    time.sleep(1)
    self._process.wait()
    return poll(self)

def step(self, *arguments, **more):
    global steps
    steps += 1
    if steps == 1:
        logging.getLogger("a_library").warning("noise of a logger")
        warnings.simplefilter("always")
        warnings.warn("noise of Python")
        os.write(2, b"noise of C++\\n")
        os.write(1, b"noise of C++ on standard output\\n")
        os.system("echo noise of a child process >&2")
        threading.Thread(target=lambda: 1 / 0, name="helper").start()
        if what == "joins":
            shutil.copy(joins, watched / "joins.yaml")
    if steps == 4:
        if what == "fails":
            raise ValueError("a defect of ours")
        if what == "joins":
            os.kill(os.getpid(), signal.SIGTERM)
        (watched / "STOP").touch()
    return real(self, *arguments, **more)

Engine.steps, BackgroundTokenising.poll, run.load_stages = step, wait, slowly
sys.exit(pretrain_mux.main(sys.argv[4:]))
"""


def on_a_terminal(server: Server, *words: str | Path) -> tuple[int, str]:
    """Run Python on a terminal of its own; returns its status and all that the terminal got, without styles."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    command = [server.python, "-c", DRIVER, *map(str, words)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        got = b""
        try:
            while part := os.read(ours, 1 << 16):
                got += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", got.decode()).replace("\r", "\n")


def frames(text: str) -> list[list[str]]:
    """The rows of each table that was drawn."""
    tables = re.split(r"elapsed \d[^\n]*\n", text)[1:]
    begin = tuple(f"{name}  " for name in (*NAMES, "summaries"))
    return [[line for line in table.split("\n") if line.startswith(begin)] for table in tables]


def statuses(frame: list[str]) -> dict[str, str]:
    return {line.split()[0]: re.split(" {2,}", line)[-1].strip() for line in frame}


def of_six_tasks(root: Path) -> list[str | Path]:
    """Words for the driver: where the sixth task appears, its file, then the flags of a run."""
    workplace, watched = furnish(root), root / "watched"
    watched.mkdir()

    def task(i: int) -> dict[str, Any]:
        training = {**TASKS["lora"]["training"], "learning_rate": 0.001 * (1 + i)}
        return {
            "adapter": {**TASKS["lora"]["adapter"], "r": 2 + i},
            "data": {**TASKS["lora"]["data"], "path": str(root / "pairs.jsonl")},
            "training": training,
            "eval": {**TASKS["lora"]["eval"], "path": str(root / "held-out.jsonl")},
        }

    tasks = workplace.write_tasks("five.yaml", {name: task(i) for i, name in enumerate(NAMES)})
    # Its tokens are in no cache: tokenising is seen.
    more = (
        (root / "pairs.jsonl").read_text() + json.dumps({"prompt": "seen here", "completion": "only"}) + "\n"
    )
    (root / "more.jsonl").write_text(more)
    joining = task(5) | {"data": {**TASKS["lora"]["data"], "path": str(root / "more.jsonl")}}
    joins = workplace.write_tasks("joins.yaml", {"summaries": joining})
    arguments = [word for word in workplace.arguments(tasks=tasks) if word != "--mux-no-progress"]
    flags: list[str | Path] = ["--no-mux-rolling", "--mux-watch", watched, "--save", root / "run"]
    return [watched, joins, *arguments, *flags]


def test_rows_before_while_and_after_a_task_joins_and_after_a_resume(tmp_path: Path, server: Server) -> None:
    watched, joins, *flags = of_six_tasks(tmp_path)
    log = tmp_path / "run" / "warnings.log"
    status, text = on_a_terminal(server, watched, joins, "joins", *flags)
    assert status == 0, text
    assert f"warnings of libraries go to {log}" in text
    # Python may add a line of source to its own.
    noise = [
        line for line in log.read_text().splitlines() if "noise of" in line and "warnings.warn" not in line
    ]
    assert len(noise) == 5 and "noise of" not in text, noise
    assert "Exception in thread helper" in text and "ZeroDivisionError" in text

    drawn = [statuses(frame) for frame in frames(text) if frame]
    assert drawn[0] == dict.fromkeys(NAMES, "loading")
    assert {**dict.fromkeys(NAMES, "running"), "summaries": "joining (tokenising)"} in drawn
    assert drawn[-1] == dict.fromkeys([*NAMES, "summaries"], "stopped")
    status, resumed = on_a_terminal(server, watched, joins, "resumes", *flags, "--load", tmp_path / "run")
    assert status == 0, resumed
    drawn += [statuses(frame) for frame in frames(resumed) if frame]
    assert drawn[-1] == dict.fromkeys([*NAMES, "summaries"], "finished")
    for found in drawn:
        assert list(found) in (NAMES, [*NAMES, "summaries"]), "names are whole, in the order of the file"
    for frame in frames(text) + frames(resumed):
        assert all(len(line) <= COLUMNS for line in frame)
        assert not frame or {"2", "0.001"} <= set(frame[0].split()), (
            "the rank and the learning rate are shown"
        )


def test_errors_reach_the_terminal(tmp_path: Path, server: Server) -> None:
    watched, joins, *flags = of_six_tasks(tmp_path)
    status, text = on_a_terminal(server, watched, joins, "fails", *flags)
    assert status == 1 and text.rstrip().endswith("ValueError: a defect of ours")
    assert "Traceback" in text.split("elapsed")[-1], "below the last table"
    (tmp_path / "pairs.jsonl").unlink()
    flags[-1] = tmp_path / "another"
    status, text = on_a_terminal(server, watched, joins, "fails", *flags)
    assert status == 2 and "pairs.jsonl: no such file" in text.split("elapsed")[-1], text
    assert not (tmp_path / "another").exists()
