"""The benchmark's script runs, and both of its sides train the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_vs_peft_on_a_tiny_backbone(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/vs_peft.py", "--backbone-shape", "tiny", "--skip-memory"]
    command += ["--threads", "1", "--repeats", "1", "--steps", "2", "--warm-up", "1"]
    command += ["--output", str(tmp_path / "result.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    for part, tasks in (("all", 4), ("short", 2)):
        found = result[part]
        assert len(found["tasks"]) == tasks
        assert found["largest_relative_loss_difference"] < 1e-5
        for side in ("peft", "mux"):
            for losses in found["losses"][side].values():
                assert len(losses) == 3
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found["seconds_of_turns"].values())
    assert "its short tasks (2)" in (tmp_path / "result.md").read_text()
