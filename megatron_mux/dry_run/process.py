"""Dry runs in a process of their own, forked for each rank: a process can join only one world."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_mux.dry_run.forks import in_forks
from megatron_mux.dry_run.recording import Recording
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.errors import UserError
from megatron_mux.memory.stream.events import StreamError
from megatron_mux.memory.worker import Worker, WorkerError

_SECONDS = 600.0
_AT_ONCE = 4
"""Maximum number of concurrent ranks, since each takes host memory."""

Part = tuple[RunSpec, int]
"""A run and a rank."""


def dry_runs(parts: Sequence[Part], whole: bool = False, seconds: float = _SECONDS) -> list[Recording]:
    """Record what ranks allocate and free. No process outlives the call.

    Args:
        parts: The ranks.
        whole: Execute all layers, also where a few tell.
        seconds: Time limit for all of them.

    Raises:
        WorkerError: One of them failed, was killed, or the time limit passed.
    """
    if not parts:
        return []
    with Worker(seconds) as worker:
        try:
            return worker.submit(_recordings, parts, whole).result()
        except UserError as error:
            raise WorkerError(" ".join(str(error).split())) from None


def _recordings(parts: Sequence[Part], whole: bool) -> list[Recording]:
    """In the process: the recordings in the order of the parts; deep stages from shallow ones if those line up."""
    # Imported once, before ranks are forked.
    from megatron_mux.dry_run import execute
    from megatron_mux.dry_run.depth import deepened, shallow

    execute.import_all(parts[0][0])
    fewer = [[] if whole else shallow(run) for run, _ in parts]
    made = iter(
        _forked([(run, rank) for few, (own, rank) in zip(fewer, parts, strict=True) for run in few or [own]])
    )
    found: list[Recording | None] = []
    for few, (run, rank) in zip(fewer, parts, strict=True):
        own = [next(made) for _ in few or [run]]
        try:
            found.append(deepened(run, rank, *own) if few else own[0])
        except StreamError:
            found.append(None)
    again = iter(_forked([part for part, one in zip(parts, found, strict=True) if one is None]))
    return [next(again) if one is None else one for one in found]


def _forked(parts: Sequence[Part]) -> list[Recording]:
    return in_forks(_dry_run, parts, max(1, min(_AT_ONCE, len(os.sched_getaffinity(0)))))


def _dry_run(part: Part) -> Recording:
    from megatron_mux.dry_run.execute import execute_dry_run

    return execute_dry_run(*part)
