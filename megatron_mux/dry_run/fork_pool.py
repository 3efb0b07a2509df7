"""Runs parts of some work in forked processes, one process per part, so that their side effects stay apart."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Generic, TypeVar

Part = TypeVar("Part")
Result = TypeVar("Result")


class LostProcess(RuntimeError):
    """A process ended without a result, for example killed when the host ran out of memory."""


class ForkPool(Generic[Part, Result]):
    """Runs a function on several inputs in parallel, each in a process of its own.

    `multiprocessing.Pool` would wait forever for a killed process and reuse processes for several inputs.

    Args:
        work: Function to run; its result is sent back.
        at_once: Maximum number of concurrent processes.
    """

    def __init__(self, work: Callable[[Part], Result], at_once: int) -> None:
        self._work = work
        self._at_once = at_once
        self._context = multiprocessing.get_context("fork")

    def __call__(self, parts: Sequence[Part]) -> list[Result]:
        """Return the results in the order of the parts.

        Raises:
            LostProcess: One of them ended without a result.
            Exception: The first exception that the work raised; the other processes are killed.
        """
        found: dict[int, Result] = {}
        waiting = list(enumerate(parts))
        running: dict[Connection, tuple[int, ForkProcess]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._at_once:
                    number, part = waiting.pop(0)
                    connection, process = self._start(part)
                    running[connection] = number, process
                ready = wait(list(running))
                for connection in [one for one in running if one in ready]:
                    number, process = running[connection]
                    found[number] = self._received(connection, process)
                    del running[connection]
        finally:
            for connection, (_, process) in running.items():
                process.kill()
                process.join()
                connection.close()
        return [found[number] for number in range(len(parts))]

    def _start(self, part: Part) -> tuple[Connection, ForkProcess]:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_do, args=(self._work, part, theirs), daemon=True)
        process.start()
        theirs.close()  # the child holds the only other end, so that its death is noticed
        return ours, process

    def _received(self, connection: Connection, process: ForkProcess) -> Result:
        try:
            result, error = connection.recv()
        except EOFError:
            process.join()
            raise LostProcess(f"a dry run.s process was lost (it ended with {process.exitcode})") from None
        process.join()
        connection.close()
        if error is not None:
            raise error
        done: Result = result
        return done


def _do(work: Callable[[Part], Result], part: Part, connection: Connection) -> None:
    try:
        answer: tuple[Result | None, Exception | None] = work(part), None
    except Exception as error:
        answer = None, error
    connection.send(answer)
