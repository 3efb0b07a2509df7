"""Runs the tests of Triton kernels in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(
    file for file in (Path(__file__).parent / "interpreted").glob("*.py") if file.name != "conftest.py"
)


# Several files for each process: what it imports takes seconds.
@pytest.mark.parametrize("files", [FILES[::2], FILES[1::2]], ids=["even", "odd"])
def test_in_interpreter(files: list[Path]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *map(str, files)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0 and " passed" in run.stdout and "skipped" not in run.stdout, run.stdout
