"""Two processes under torchrun: a mistake is said once, whichever of them meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end.workplace import TASKS, furnish

ROOT = Path(__file__).resolve().parents[2]

# Of the backbone's file, the second stage alone meets a part that cannot be read.
ONE_BAD_DISK = """
import os, sys
from megatron_mux.backbone.model import Backbone
from megatron_mux.errors import UserError
import pretrain_mux

def load(*arguments, **options):
    raise UserError("model.safetensors cannot be read: Input/output error.")

if os.environ["RANK"] == "1":
    Backbone.load = load
sys.exit(pretrain_mux.main())
"""


def _said(script: Path, arguments: Sequence[str]) -> list[str]:
    """Our own lines of standard error; the run must end by itself, and fail."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*torchrun, str(script), *arguments, "--pipeline-model-parallel-size", "2"],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 1, run.stderr
    return [line for line in run.stderr.splitlines() if line.startswith("pretrain_mux.py: ")]


def test_what_one_process_meets_alone_is_said_with_its_rank(tmp_path: Path) -> None:
    workplace = furnish(tmp_path)
    script = tmp_path / "one_bad_disk.py"
    script.write_text(ONE_BAD_DISK)
    (line,) = _said(script, workplace.arguments())
    assert line == "pretrain_mux.py: rank 1: model.safetensors cannot be read: Input/output error."


def test_what_every_process_meets_is_said_once(tmp_path: Path) -> None:
    workplace = furnish(tmp_path)
    task = {**TASKS["lora"], "adapter": {**TASKS["lora"]["adapter"], "target_modules": ["q_prj"]}}
    tasks = workplace.write_tasks("mistaken.yaml", {"lora": task})
    (line,) = _said(ROOT / "pretrain_mux.py", workplace.arguments(tasks=tasks))
    assert line.startswith("pretrain_mux.py: task 'lora'") and "q_prj" in line
