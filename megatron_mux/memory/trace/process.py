"""Tracing in a process of its own: what a fake GPU needs does not touch this one, and a real GPU is out of sight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from megatron_mux.memory.events import Stream
from megatron_mux.memory.trace.case import Case

_SECONDS = 120.0


class TraceError(RuntimeError):
    """A trace that did not come about: the message is the traced process's last word."""


def traces(cases: Sequence[Case], seconds: float = _SECONDS) -> list[Stream]:
    """The streams of some cases, all traced in one process.

    Args:
        cases: What to trace.
        seconds: How long it may take.

    Raises:
        TraceError: It failed, or took longer.
    """
    asked = [json.dumps(case.to_dict()) for case in cases]
    return [Stream.from_json(line) for line in answers("megatron_mux.memory.trace.worker", asked, seconds)]


def answers(worker: str, asked: Sequence[str], seconds: float) -> list[str]:
    """What a module answers, run in a process of its own to which no GPU is visible.

    Args:
        worker: The module: it takes a line on standard input for each line that it answers on standard output.
        asked: The lines.
        seconds: How long it may take.

    Raises:
        TraceError: It failed, or took longer.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", worker],
            input="\n".join(asked),
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TraceError(f"the trace took longer than {seconds:.0f} s") from error
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise TraceError(words[-1])
    return done.stdout.splitlines()
