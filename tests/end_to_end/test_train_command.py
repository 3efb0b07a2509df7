"""`megatron-mux train` and `megatron_mux.train` on two processes that they start themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from megatron_mux import read_run
from tests.end_to_end.forked import ROOT, Server
from tests.end_to_end.outcome import assert_same_outcome
from tests.end_to_end.workplace import TASKS, Workplace, furnish

TWO_STAGES = ("--pipeline-model-parallel-size", "2", "--no-mux-rolling")
TRAINING = {"per_device_train_batch_size": 2, "max_steps": 2}
FROM_PYTHON = """
import megatron_mux
from megatron_mux.tasks import read_task
from pathlib import Path

tasks = [{"name": name, **task} for name, task in TASKS.items()]
tasks[1] = read_task(tasks[1], Path("."))
results = megatron_mux.train(
    backbone="backbone", tasks=tasks, save="run", processes=2, pipeline_model_parallel_size=2, mux_rolling=False
)
for result in results.values():
    print(result.name, result.status, result.step, result.adapter, sorted(result.metrics))
"""


def start(server: Server, place: Workplace, *words: str) -> subprocess.Popen[str]:
    """A process in the workplace, with no launcher's environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.Popen(
        [server.python, *words],
        cwd=place.root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_tasks_train_from_python_on_two_processes(server: Server, tmp_path: Path) -> None:
    place = furnish(tmp_path)
    tasks = {name: {**TASKS[name], "training": TRAINING} for name in ("lora", "prefix")}
    run = start(server, place, "-c", f"TASKS = {tasks!r}\n{FROM_PYTHON}")
    output, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    assert "lora finished 2 run/lora/checkpoint-2 ['eval_accuracy', 'eval_loss']" in output
    assert "prefix finished 2 run/prefix/checkpoint-2 []" in output


def test_a_signal_is_passed_on_and_a_mistake_told_once(server: Server, tmp_path: Path) -> None:
    place = furnish(tmp_path)
    long = {**TASKS["prefix"], "training": {**TRAINING, "max_steps": 100_000}}
    place.write_tasks("long.yaml", {"a": long})
    wrong = {**TASKS["lora"], "adapter": {"peft_type": "LORA", "target_modules": ["q_prj"]}}
    place.write_tasks("wrong.yaml", {"lora": wrong})
    command = (
        "-m",
        "megatron_mux.cli",
        "train",
        "--backbone",
        "backbone",
        "--mux-no-progress",
        "--processes",
        "2",
    )

    run = start(server, place, *command, "wrong.yaml")
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 2
    (line,) = errors.splitlines()
    assert line.startswith("megatron-mux train: task 'lora'") and "q_prj" in line

    run = start(server, place, *command, "long.yaml")
    metrics = tmp_path / "runs" / "long" / "a" / "metrics.jsonl"
    for _ in range(1000):
        if metrics.exists() and metrics.read_text():
            break
        assert run.poll() is None, run.communicate()
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    output, errors = run.communicate(timeout=100)
    assert run.returncode == 0, errors
    assert "no --save: saving to runs/long" in output and "stopped by a signal" in output
    (result,) = read_run(tmp_path / "runs" / "long").values()
    assert result.status == "running" and result.adapter is not None and result.adapter.is_dir()
    assert result.step == result.history[-1]["step"]


def test_ranks_exit_together_at_an_interval_or_after_minutes(server: Server, tmp_path: Path) -> None:
    place = furnish(tmp_path)
    command = ("-m", "megatron_mux.cli", "train", *place.arguments("--processes", "2", *TWO_STAGES))
    parts = place.root / "parts"
    for directory, flags, said in (
        (place.root / "whole", (), ""),
        (parts, ("--exit-interval", "3"), "stopped after 3 steps (--exit-interval 3)"),
        (
            parts,
            ("--exit-duration-in-mins", "0.001"),
            "stopped after 0.001 minutes (--exit-duration-in-mins)",
        ),
        (parts, (), ""),
    ):
        run = start(server, place, *command, "--save", str(directory), "--load", str(directory), *flags)
        output, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors
        assert said in output and output.count("stopped after") == bool(said)
    assert_same_outcome(parts, place.root / "whole")
