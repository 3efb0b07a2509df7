"""A task that joins with a large file: the others train while it is tokenised, and it does as soon as that is done."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.end_to_end.forked import Server
from tests.end_to_end.workplace import Workplace

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_of_a_joining_file(server: Server, workplace: Workplace) -> None:
    flags = ["--backbone", str(workplace.backbone), "--records", "3000", "--batch", "2", "--allowed", "any"]
    run = subprocess.run(
        [server.python, "benchmarks/joining.py", *flags, "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    found = json.loads(run.stdout)["any core"]
    assert found["steps"]["at work"] > 3, "the others do not wait"
    assert found["first_step_after_s"] > 0 and found["tokenised_s"] > 0
    # In steps, not in seconds: the machine may be busy. A burst takes two seconds, or one step.
    assert found["bursts_after_exit"] <= 1, "it joins before the next burst but one"
