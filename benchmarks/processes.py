"""A script on several processes, a pipeline stage or a tensor rank each, one core to a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_on(processes: int, script: str, words: Sequence[object]) -> Any:
    """Run `script` once more under torchrun with `--worker FILE`, and return the JSON it leaves there.

    Args:
        processes: How many.
        script: Its `__file__`.
        words: Its other arguments.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "result.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *launch, script, *map(str, words), "--worker", str(file)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=scratch)
        return json.loads(file.read_text())


def one_core_each() -> int:
    """Keep this process to a core and a thread of its own; returns its rank."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= int(os.environ["WORLD_SIZE"]):
        os.sched_setaffinity(0, {cores[rank]})
    return rank
