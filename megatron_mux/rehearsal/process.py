"""Rehearsals in a process of their own, a forked one for each rank: a world, once joined, is a process's only one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from megatron_mux.memory.trace.process import TraceError, without_gpu
from megatron_mux.rehearsal.recording import Recording
from megatron_mux.rehearsal.setting import Setting

_SECONDS = 600.0


def rehearsals(
    parts: Sequence[tuple[Setting, int]], whole: bool = False, seconds: float = _SECONDS
) -> list[Recording]:
    """What ranks allocate and free.

    Args:
        parts: Settings, and of each a rank.
        whole: Rehearse all layers, also where a few tell.
        seconds: How long all of it may take.

    Raises:
        TraceError: One of them failed, or it took longer.
    """
    asked = [json.dumps([setting.to_dict(), rank, whole]) for setting, rank in parts]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_mux.rehearsal.worker"],
            input="\n".join(asked),
            capture_output=True,
            text=True,
            timeout=seconds,
            env=without_gpu(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TraceError(f"the rehearsal took longer than {seconds:g} s") from error
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise TraceError(words[-1])
    return [Recording.from_json(line) for line in done.stdout.splitlines()]
