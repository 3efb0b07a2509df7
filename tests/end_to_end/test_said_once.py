"""Two processes under torchrun: a mistake is said once, whichever of them meets it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end.forked import Server
from tests.end_to_end.workplace import TASKS, furnish

ROOT = Path(__file__).resolve().parents[2]

# Of the backbone's file, the second stage alone meets a part that cannot be read.
# It stays a while after leaving the others, so that they meet the lost connection before the launcher ends them.
ONE_BAD_DISK = """
import os, sys, time
from megatron_mux.backbone.model import Backbone
from megatron_mux.errors import UserError
import pretrain_mux

def load(*arguments, **options):
    raise UserError("model.safetensors cannot be read: Input/output error.")

if os.environ["RANK"] == "1":
    Backbone.load = load
status = pretrain_mux.main()
print("rank", os.environ["RANK"], "ends with", status, flush=True)
time.sleep(4 if os.environ["RANK"] == "1" else 0)
sys.exit(status)
"""


# What a process of ours leaves when it meets a defect; nothing of one user's mistake is one.
BUG = """
import os, sys
from megatron_mux.backbone.model import Backbone
import pretrain_mux

def load(*arguments, **options):
    raise RuntimeError("a defect of ours")

Backbone.load = load
sys.exit(pretrain_mux.main())
"""


def _run(server: Server, script: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The script on two processes; it must end by itself, and fail."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    torchrun = [server.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
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
    return run


def _said(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Our own lines of standard error, beside which stands no stack trace but torchrun's own."""
    traces = run.stderr.split("Traceback (most recent call last)")[1:]
    assert len(traces) == 1 and "in launch_agent" in traces[0], run.stderr
    assert "megatron_mux" not in traces[0] and 'pretrain_mux.py", line' not in traces[0], run.stderr
    return [line for line in run.stderr.splitlines() if line.startswith("pretrain_mux.py: ")]


def test_what_one_process_meets_alone_is_said_with_its_rank(tmp_path: Path, server: Server) -> None:
    workplace = furnish(tmp_path)
    script = tmp_path / "one_bad_disk.py"
    script.write_text(ONE_BAD_DISK)
    run = _run(server, script, workplace.arguments())
    assert _said(run) == ["pretrain_mux.py: rank 1: model.safetensors cannot be read: Input/output error."]
    assert "rank 0 ends with 2" in run.stdout, "it was not ended by the launcher"


def test_a_defect_is_not_taken_for_the_echo_of_a_mistake(tmp_path: Path, server: Server) -> None:
    workplace = furnish(tmp_path)
    script = tmp_path / "bug.py"
    script.write_text(BUG)
    run = _run(server, script, workplace.arguments())
    assert "RuntimeError: a defect of ours" in run.stderr


def test_what_every_process_meets_is_said_once(tmp_path: Path, server: Server) -> None:
    workplace = furnish(tmp_path)
    task = {**TASKS["lora"], "adapter": {**TASKS["lora"]["adapter"], "target_modules": ["q_prj"]}}
    tasks = workplace.write_tasks("mistaken.yaml", {"lora": task})
    (line,) = _said(_run(server, ROOT / "pretrain_mux.py", workplace.arguments(tasks=tasks)))
    assert line.startswith("pretrain_mux.py: task 'lora'") and "q_prj" in line
