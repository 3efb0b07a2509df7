"""Two runs started on one `--save`: the second is refused, and the first's files are as if it had been alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

from megatron_mux.directory_lock import LOCK, RECORD
from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.outcome import metrics
from tests.end_to_end.workplace import TASKS, Workplace


def test_the_second_of_two_runs_is_refused(workplace: Workplace, server: Server) -> None:
    directory = workplace.root / "two-at-once"
    arguments = workplace.arguments("--save", directory, "--save-interval", "3")
    started = [server.start(arguments), server.start(arguments)]
    runs = [server.wait(run) for run in started]
    assert sorted(run.status for run in runs) == [0, 2], [run.errors for run in runs]
    winner, loser = sorted(zip(runs, started, strict=True), key=lambda pair: pair[0].status)
    assert loser[0].seconds < winner[0].seconds
    assert f"process {winner[1].pid} " in loser[0].errors and socket.gethostname() in loser[0].errors
    assert "--break-lock" in loser[0].errors and "Traceback" not in loser[0].errors
    for name, task in TASKS.items():
        steps = [line["step"] for line in metrics(directory, name) if "loss" in line]
        assert steps == list(range(1, task["training"]["max_steps"] + 1))
    assert json.loads((directory / RECORD).read_text())["pid"] == winner[1].pid
    assert not (directory / LOCK).exists()


def test_a_stopped_holder_keeps_the_directory_until_the_lock_is_broken(
    workplace: Workplace, server: Server
) -> None:
    """It is alive: it may go on at any time, and must then not write over its successor."""
    directory = workplace.root / "broken"
    arguments = workplace.arguments("--save", directory, "--load", directory, "--save-interval", "3")
    first = server.start(arguments, Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 20, "stop"))
    while Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.02)
    refused = server.run(arguments)
    assert refused.status == 2 and f"process {first.pid} " in refused.errors
    second = server.run([*arguments, "--break-lock"])
    assert second.status == 0, second.errors
    finished = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    os.kill(first.pid, signal.SIGCONT)
    late = server.wait(first)
    assert late.status == 2 and "taken over by" in late.errors, late.errors
    assert [path for path, content in finished.items() if path.read_bytes() != content] == []


def test_a_run_that_died_before_its_first_save_is_begun_anew(workplace: Workplace, server: Server) -> None:
    """Its lines of metrics go: each step stands there once."""
    directory = workplace.root / "no-save-yet"
    arguments = workplace.arguments("--save", directory)
    server.run(arguments, Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 16, "kill before"))
    assert metrics(directory, "lora") and not (directory / "manifests").exists()
    again = server.run(arguments)
    assert again.status == 0, again.errors
    steps = [line["step"] for line in metrics(directory, "lora") if "loss" in line]
    assert steps == list(range(1, TASKS["lora"]["training"]["max_steps"] + 1))
