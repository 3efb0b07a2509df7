"""A script on several processes, a pipeline stage or a tensor rank each, one core to a process."""

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


def add_worker(parser: argparse.ArgumentParser) -> None:
    """`--worker FILE`, which `measured` starts its processes with."""
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def measured(
    arguments: argparse.Namespace,
    processes: int,
    script: str,
    flags: Sequence[str],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
) -> dict[str, Any] | None:
    """What `measure` finds, called in each of several processes that run the script once more under torchrun.

    Args:
        arguments: The script's command line, `--worker` among it.
        processes: How many.
        script: Its `__file__`.
        flags: What the processes are to be told of the command line.
        measure: Gives the result in the first process, nothing in the others.

    Returns:
        The result; None in one of those processes.
    """
    if arguments.worker is not None:
        result = measure(arguments)
        if result:
            arguments.worker.write_text(json.dumps(result))
        return None
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "result.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *launch, script, *_words(arguments, flags), "--worker", str(file)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=scratch)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def _words(arguments: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    words: list[str] = []
    for flag in flags:
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if isinstance(value, Path):
            value = value.resolve()
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def one_core_each() -> int:
    """Keep this process to a core and a thread of its own; returns its rank."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= int(os.environ["WORLD_SIZE"]):
        os.sched_setaffinity(0, {cores[rank]})
    return rank
