"""Runs parts of some work in forked processes, one process per part, so that their side effects stay apart."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TypeVar

from megatron_mux.memory.worker import WorkerError

Part = TypeVar("Part")
Result = TypeVar("Result")


def in_forks(work: Callable[[Part], Result], parts: Sequence[Part], at_once: int) -> list[Result]:
    """Run a function on several inputs in parallel, each in a process of its own.

    `multiprocessing.Pool` would wait forever for a killed process and reuse processes for several inputs.

    Args:
        work: Function to run; its result is sent back.
        parts: Its inputs.
        at_once: Maximum number of concurrent processes.

    Returns:
        The results in the order of the parts.

    Raises:
        WorkerError: A process ended without a result, for example killed when the host ran out of memory.
        Exception: The first exception that the work raised; the other processes are killed.
    """
    context = multiprocessing.get_context("fork")
    waiting = deque(enumerate(parts))
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    found: dict[int, Result] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, part = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_send_result, args=(work, part, theirs), daemon=True)
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
    return [found[number] for number in range(len(parts))]


def _received(connection: Connection, process: ForkProcess) -> Result:
    try:
        result, error = connection.recv()
    except EOFError:
        process.join()
        raise WorkerError(f"a dry run's process was lost (it ended with {process.exitcode})") from None
    process.join()
    connection.close()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _send_result(work: Callable[[Part], Result], part: Part, connection: Connection) -> None:
    try:
        answer: tuple[Result | None, Exception | None] = work(part), None
    except Exception as error:
        answer = None, error
    connection.send(answer)
