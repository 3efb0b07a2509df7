"""Dry runs in a process of their own, forked for each rank: a process can join only one world."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from megatron_mux.attributes import replaced
from megatron_mux.dry_run.run_spec import Recording, RunSpec
from megatron_mux.errors import UserError
from megatron_mux.memory.stream.events import StreamError
from megatron_mux.memory.worker import Worker, WorkerError

_SECONDS = 600.0
_AT_ONCE = 4
"""Maximum number of concurrent ranks, since each takes host memory."""

Part = tuple[RunSpec, int]
"""A run and a rank."""

Input = TypeVar("Input")
Result = TypeVar("Result")


_workers: dict[tuple[int, float], Worker] = {}


def kept_worker(number: int = 0, seconds: float = _SECONDS) -> Worker:
    """A process for dry runs. It is kept: what it imports takes seconds. It ends with this one.

    Args:
        number: Which of several.
    """
    return _workers.setdefault((number, seconds), Worker(seconds))


def end_worker() -> None:
    """End the processes for dry runs, whatever they do; whoever needs one again starts another."""
    while _workers:
        _workers.popitem()[1].__exit__(None, None, None)


def prepare(worker: Worker) -> Future[None]:
    """Let a process import what dry runs need, while the caller goes on: seconds that its first dry run then spares."""
    return worker.submit(_imported)


def _imported() -> None:
    from megatron_mux.dry_run import execute

    execute.import_engine()


def dry_runs(
    parts: Sequence[Part], whole: bool = False, seconds: float = _SECONDS, worker: Worker | None = None
) -> list[Recording]:
    """Record what ranks allocate and free. No process outlives the call, but for a given worker and what it runs.

    Args:
        whole: Execute all layers, also where a few tell.
        seconds: Time limit for all of them; a given worker has its own.
        worker: The process to run them in; None: one of its own.

    Raises:
        WorkerError: One of them failed, was killed, or the time limit passed.
    """
    if not parts:
        return []
    with nullcontext(worker) if worker is not None else Worker(seconds) as process:
        try:
            return process.submit(recordings, parts, whole).result()
        except UserError as error:
            raise WorkerError(" ".join(str(error).split())) from None


def recordings(parts: Sequence[Part], whole: bool, nice: int = 0) -> list[Recording]:
    """In the process: the recordings in the order of the parts; deep stages from shallow ones if those line up.

    Args:
        parts, whole: See `dry_runs`.
        nice: By how much the work gives way to that of other processes, as of `os.nice`.
    """
    # Imported once, before ranks are forked.
    from megatron_mux.dry_run import execute
    from megatron_mux.dry_run.depth import deepened, shallow

    execute.import_all(parts[0][0])
    fewer = [[] if whole else shallow(run) for run, _ in parts]
    made = iter(
        _forked(
            [(run, rank) for few, (own, rank) in zip(fewer, parts, strict=True) for run in few or [own]], nice
        )
    )
    found: list[Recording | None] = []
    for few, (run, rank) in zip(fewer, parts, strict=True):
        own = [next(made) for _ in few or [run]]
        try:
            found.append(deepened(run, rank, *own) if few else own[0])
        except StreamError:
            found.append(None)
    again = iter(_forked([part for part, one in zip(parts, found, strict=True) if one is None], nice))
    return [next(again) if one is None else one for one in found]


def _forked(parts: Sequence[Part], nice: int) -> list[Recording]:
    return in_forks(partial(_dry_run, nice), parts, max(1, min(_AT_ONCE, len(os.sched_getaffinity(0)))))


def _dry_run(nice: int, part: Part) -> Recording:
    from megatron_mux.dry_run.execute import execute_dry_run
    from megatron_mux.dry_run.stand_ins import fewer_bits_
    from megatron_mux.kernels import dropout

    os.nice(nice)
    with replaced(dropout, "_mix_", fewer_bits_):
        return execute_dry_run(*part)


def in_forks(work: Callable[[Input], Result], inputs: Sequence[Input], at_once: int) -> list[Result]:
    """Run a function on several inputs in parallel, each in a process of its own.

    `multiprocessing.Pool` would wait forever for a killed process and reuse processes for several inputs.

    Returns:
        The results in the order of the inputs.

    Raises:
        WorkerError: A process ended without a result, for example killed when the host ran out of memory.
        Exception: The first exception that the work raised; the other processes are killed.
    """
    context = multiprocessing.get_context("fork")
    waiting = deque(enumerate(inputs))
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    found: dict[int, Result] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, value = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_send_result, args=(work, value, theirs), daemon=True)
                process.start()
                theirs.close()  # the child holds the only other end, so that its death is noticed
                running[ours] = number, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                number, process = running.pop(ready)
                found[number] = _received(ready, process)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return [found[number] for number in range(len(inputs))]


def _received(connection: Connection, process: ForkProcess) -> Any:
    try:
        result, error = connection.recv()
    except EOFError:
        process.join()
        raise WorkerError(f"a dry run's process was lost (it ended with {process.exitcode})") from None
    process.join()
    connection.close()
    if error is not None:
        raise error
    return result


def _send_result(work: Callable[[Input], Result], value: Input, connection: Connection) -> None:
    try:
        answer: tuple[Result | None, Exception | None] = work(value), None
    except Exception as error:
        answer = None, error
    connection.send(answer)
