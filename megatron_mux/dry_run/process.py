"""Dry runs in a process of their own, forked for each rank: a process can join only one world."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from megatron_mux.dry_run.recording import Recording
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.memory.trace.process import TraceError, without_gpu

_SECONDS = 600.0


def dry_runs(
    parts: Sequence[tuple[RunSpec, int]], whole: bool = False, seconds: float = _SECONDS
) -> list[Recording]:
    """Record what ranks allocate and free. No process outlives the call.

    Args:
        parts: Pairs of a run and a rank.
        whole: Rehearse all layers, also where a few tell.
        seconds: Time limit for all of them.

    Raises:
        TraceError: One of them failed, was killed, or the time limit passed.
    """
    if not parts:
        return []
    asked = [json.dumps([run.to_dict(), rank, whole]) for run, rank in parts]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_mux.dry_run.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=without_gpu(),
        start_new_session=True,  # a group of its own: its forks end with it
    )
    try:
        answers, said = process.communicate("\n".join(asked), timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise TraceError(f"the dry run took longer than {seconds:g} s") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        words = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
        raise TraceError(words[-1])
    return [Recording.from_json(line) for line in answers.splitlines()]
