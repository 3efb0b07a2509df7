"""Runs a benchmark script in several processes, one rank and one core each."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def add_worker_flag(parser: argparse.ArgumentParser) -> None:
    """Add the hidden flag `--worker FILE`, which `run_in_processes` passes to its processes."""
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def run_in_processes(
    arguments: argparse.Namespace,
    processes: int,
    script: str,
    flags: Sequence[str],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
) -> dict[str, Any] | None:
    """Run a script again under torchrun, in several processes that each call `measure`.

    Args:
        arguments: The script's command line, including `--worker`.
        processes: Number of processes.
        script: The script's `__file__`.
        flags: Flags of the command line to pass on to the processes.
        measure: Returns the result on rank 0 and an empty result on the others.

    Returns:
        The result of rank 0; None in the processes themselves.
    """
    if arguments.worker is not None:
        from megatron_mux.runtime import shutdown

        result = measure(arguments)
        if result:
            arguments.worker.write_text(json.dumps(result))
        shutdown()  # NCCL warns of process groups that a process leaves behind
        return None
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "result.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *launch, script, *flag_words(arguments, flags), "--worker", str(file)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=scratch)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def flag_words(arguments: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Flags as they were given, to call a script again with them."""
    words: list[str] = []
    for flag in flags:
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if isinstance(value, Path):
            value = value.resolve()
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def pin_to_core() -> int:
    """Pin this process to a core of its own, with one thread; returns its rank."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= int(os.environ["WORLD_SIZE"]):
        os.sched_setaffinity(0, {cores[rank]})
    return rank
