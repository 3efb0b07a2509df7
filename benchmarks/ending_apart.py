"""Many tasks on one backbone that end one after another: start, steps, saves, a kill and a resume.

    python benchmarks/ending_apart.py [--tasks 500] [--steps 50] [--package OLD/megatron_mux] [--output FILE.json]

Each LoRA task has a data file of its own; the tasks end evenly spread over the second half of the steps, and each is
saved then. The process may open 1,024 files. One run goes to its end, one is killed once a quarter of the tasks has
ended, and continued. Reported are seconds, descriptors, resident memory, and the bytes that were written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from script import add_output, command_line, publish, table

ROOT = Path(__file__).resolve().parents[1]
DESCRIPTORS = 1024


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--steps", type=int, default=50, help="of the longest task")
    parser.add_argument(
        "--package", type=Path, default=ROOT / "megatron_mux", help="of a checkout (this one)"
    )
    add_output(parser)
    return parser.parse_args(argv)


def prepare(directory: Path, tasks: int, steps: int) -> list[str | Path]:
    """Write backbone, data and tasks; returns the flags of a run."""
    sys.path.insert(0, str(ROOT))
    from tests import tiny_models

    backbone = tiny_models.words(tiny_models.make(directory / "backbone", "llama"))
    entries = []
    for number in range(tasks):
        data = directory / f"data-{number}.jsonl"
        data.write_text(f'{{"text": "{" ".join("abcdefg"[: 2 + number % 6])}"}}\n' * 16)
        last = steps // 2 + (number + 1) * (steps - steps // 2) // tasks
        training = {"per_device_train_batch_size": 1, "max_steps": last, "learning_rate": 1e-3}
        adapter = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
        entries.append(
            {
                "name": f"task-{number}",
                "adapter": adapter,
                "data": {"path": str(data), "max_length": 16},
                "training": training,
            }
        )
    (directory / "tasks.yaml").write_text(yaml.safe_dump({"tasks": entries}))
    return ["--backbone", backbone, "--mux-tasks", directory / "tasks.yaml", "--mux-policy", "spatial"]


def start(package: Path, flags: Sequence[str | Path], log: Path) -> subprocess.Popen[bytes]:
    """Start a run of a checkout."""
    root = package.resolve().parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, root / "pretrain_mux.py", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    return process


def follow(process: subprocess.Popen[bytes], save: Path, kill: Callable[[], bool]) -> dict[str, Any]:
    """Watch a run until it ends, or `kill` says that it is to be killed."""
    began, first, most, peak, written = time.monotonic(), None, 0, 0, 0
    place = Path(f"/proc/{process.pid}")
    metrics = save / "task-0" / "metrics.jsonl"
    while process.poll() is None:
        try:
            most = max(most, len(os.listdir(place / "fd")))
            status = dict(
                line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line
            )
            peak = int(status["VmHWM"].split()[0]) * 1024
            written = int((place / "io").read_text().split("wchar:")[1].split()[0])
        except (OSError, KeyError):
            pass  # it has just ended
        if first is None and metrics.exists() and metrics.stat().st_size:
            first = time.monotonic() - began
        if kill():
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(0.05)
    return {
        "status": process.returncode,
        "seconds": time.monotonic() - began,
        "seconds to the first step": first,
        "descriptors": most,
        "resident bytes": peak,
        "bytes written": written,
    }


def ended(save: Path, steps: int) -> int:
    """Tasks with a checkpoint of their end."""
    return sum(
        1 for path in save.glob("task-*/checkpoint-*") if int(path.name.rpartition("-")[2]) > steps // 2
    )


def step_seconds(save: Path, task: int, steps: int) -> tuple[float, float]:
    """Median and longest seconds of a step of the second half, by the task that lasts to the end."""
    lines = [json.loads(line) for line in (save / f"task-{task}" / "metrics.jsonl").read_text().splitlines()]
    walls = [line["wall_s"] for line in lines if "loss" in line and line["step"] >= steps // 2]
    seconds = [after - before for before, after in itertools.pairwise(walls)]
    return statistics.median(seconds), max(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and publish."""
    arguments = parse(argv)
    steps, rows = arguments.steps, []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        flags = prepare(directory, arguments.tasks, steps)
        results: dict[str, Any] = {}
        for name, save, more, quarter in (
            ("to its end", "whole", (), False),
            ("killed", "killed", (), True),
            ("continued", "killed", ("--load", directory / "killed"), False),
        ):
            place = directory / save
            log = directory / f"{name}.log"
            process = start(arguments.package, [*flags, "--save", place, *more], log)

            def kill(place: Path = place, asked: bool = quarter) -> bool:
                return asked and ended(place, steps) >= arguments.tasks // 4

            results[name] = found = follow(process, place, kill)
            if found["status"] not in (0, -signal.SIGKILL):
                print(log.read_text()[-2000:], file=sys.stderr)
                break
            if name == "to its end":
                found["median step"], found["longest step"] = step_seconds(place, arguments.tasks - 1, steps)
                found["bytes kept"] = sum(f.stat().st_size for f in place.rglob("*") if f.is_file())
    for name, found in results.items():
        rows += [(name, what, value) for what, value in found.items()]
    publish(results, "\n".join(table("run | what | value", rows)), arguments.output)
    return 0 if len(results) == 3 else 1


if __name__ == "__main__":
    raise SystemExit(main())
