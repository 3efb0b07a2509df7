"""Commits in directories of their own, and the environment that their commands run in."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("megatron_mux", "pretrain_mux.py", "tools", "benchmarks")


def check_out(commit: str | None, directory: Path) -> None:
    """Put the files of a commit, or of the working tree if None, into `directory`."""
    if commit is not None:
        archive = subprocess.run(
            ["git", "archive", commit, *PARTS], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
        return
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z", *PARTS],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes((ROOT / name).read_bytes())


def environment_of(code: Path, results: Path) -> dict[str, str]:
    """What the commands of a checkout run with: one thread, no GPU, no network, a cache of their own."""
    return {
        **os.environ,
        "PYTHONPATH": str(code),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MEGATRON_MUX_CACHE": str(results / "cache"),
        "PYTHONWARNINGS": "ignore",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }


def free_port() -> int:
    """A port that no process listens on, and that the system gives to none: runs beside this one open many."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
