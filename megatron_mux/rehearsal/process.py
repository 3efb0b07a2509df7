"""Rehearsals in a process of their own, a forked one for each rank: a world, once joined, is a process's only one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from megatron_mux.memory.trace.process import TraceError, without_gpu
from megatron_mux.rehearsal.recording import Recording
from megatron_mux.rehearsal.setting import Setting

_SECONDS = 600.0


def rehearsals(
    parts: Sequence[tuple[Setting, int]], whole: bool = False, seconds: float = _SECONDS
) -> list[Recording]:
    """What ranks allocate and free. However it ends, no process is left.

    Args:
        parts: Settings, and of each a rank.
        whole: Rehearse all layers, also where a few tell.
        seconds: How long all of it may take.

    Raises:
        TraceError: One of them failed or was lost, or it took longer.
    """
    if not parts:
        return []
    asked = [json.dumps([setting.to_dict(), rank, whole]) for setting, rank in parts]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_mux.rehearsal.worker"],
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
        raise TraceError(f"the rehearsal took longer than {seconds:g} s") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        words = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
        raise TraceError(words[-1])
    return [Recording.from_json(line) for line in answers.splitlines()]
