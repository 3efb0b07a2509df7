"""Processes that form a world, forked from one that has imported everything, and asked step by step."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from tests.end_to_end.ranks import free_port

_ours: list[Connection] = []
"""This process's ends of all worlds. Those that are forked close them, so that they notice when it is gone."""


class World:
    """Processes that form a world. They are forked, and end with the context.

    Args:
        ranks: How many.
        work: A generator function, called in each: the mappings that it yields, one after the other, are what `ask`
            returns. One with an `error` says that the process has failed.
        arguments: Of the function.
    """

    def __init__(self, ranks: int, work: Callable[..., Iterator[Any]], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        port = free_port()
        self._ends, self._processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            self._ends.append(here)
            _ours.append(here)
            process = context.Process(
                target=_run_rank, args=(rank, ranks, port, there, work, arguments, list(_ours)), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()

    def ask(self, seconds: float = 120.0) -> list[Any]:
        """Let all go on to what they yield next: what each yields, None where a process has failed.

        When one has failed, the others are not waited for, since they may wait for it.
        """
        for end in self._ends:
            with contextlib.suppress(BrokenPipeError):
                end.send(None)
        found: list[Any] = [None] * len(self._ends)
        waiting, until = list(self._ends), time.monotonic() + seconds
        while waiting and (left := until - time.monotonic()) > 0:
            ready = wait(waiting, left)
            waiting = [end for end in waiting if end not in ready]
            for rank, end in enumerate(self._ends):
                if end not in ready:
                    continue
                with contextlib.suppress(EOFError):
                    found[rank] = end.recv()
                if not found[rank] or found[rank].get("error"):
                    until = min(until, time.monotonic() + 0.2)  # other processes may report an error as well
        return found


def _run_rank(
    rank: int,
    ranks: int,
    port: int,
    end: Connection,
    work: Callable[..., Iterator[Any]],
    arguments: Sequence[Any],
    others: Sequence[Connection],
) -> None:
    for other in others:
        other.close()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide what the peers of a failed rank print
    end.recv()
    for found in work(*arguments):
        end.send(found)
        end.recv()
    os._exit(0)
