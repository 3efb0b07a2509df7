"""Tokenising in a process of its own, at idle priority, while this one trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_mux.data.tokenised_file import (
    Progress,
    Reading,
    TokenisedFile,
    progress_lines,
    tokenise_file,
)
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.errors import UserError

Results = dict[str, TokenisedFile | UserError]
"""By `Reading.key`: the tokens of a source, or what is wrong with it."""

# Not handed on: the process is none of the run's ranks.
_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class BackgroundTokenising:
    """A process that tokenises sources into the cache.

    It ends when they are done, when it is cancelled, or soon after this process ends.

    Args:
        backbone: Directory of the tokenizer.
        readings: Sources, and what for.
        cache: See `token_cache_directory`.
        niceness: Of the process, relative to this one; 19 is idle priority.

    Attributes:
        log_lines: Lines for people, to be taken away: how far it is.
        results: None until it is done.
    """

    def __init__(
        self,
        backbone: Path,
        readings: Sequence[Reading],
        cache: str | Path | None,
        niceness: int = 19,
    ) -> None:
        self.readings = tuple({reading.key: reading for reading in readings}.values())
        self.log_lines: list[str] = []
        self.results: Results | None = None
        environment = {key: value for key, value in os.environ.items() if key not in _OF_A_RANK}
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment["CUDA_VISIBLE_DEVICES"] = ""
        self._connection, theirs = Pipe()
        self._connection.send((backbone, self.readings, cache, niceness))
        # Not by `multiprocessing`, which would run this program's main module again.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_mux.data.background"],
            env=environment,
            stdin=theirs.fileno(),
            # Ctrl-C is for this process, which then cancels it. The session stays: `nice` counts within one.
            process_group=0,
        )
        theirs.close()

    def poll(self) -> bool:
        """Whether it is done: `results` are there. Takes no time."""
        while self.results is None and self._connection.poll():
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                message = _all(self.readings, self._died(self._process.wait()))
            if isinstance(message, str):
                self.log_lines.append(message)
            else:
                self.results = message
        return self.results is not None and self._process.poll() is not None

    def cancel(self) -> None:
        """End the process; what it has not finished is lost."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _died(self, status: int) -> UserError:
        how = f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"
        return UserError(f"{_labels(self.readings)}: the process that tokenises {how}")


def work(connection: Connection) -> None:
    """Tokenise what `BackgroundTokenising`, at the other end of a connection, asks for: the work of its process."""
    backbone, readings, cache, niceness = connection.recv()
    os.nice(niceness)
    results: Results = {}
    try:
        tokenizer = load_tokenizer(backbone)
        for reading in readings:
            source, loss = reading
            try:
                progress = _progress(source.label, connection)
                results[reading.key] = tokenise_file(source, tokenizer, cache, progress, loss)
            except UserError as error:
                results[reading.key] = error
    except Exception as error:
        results = _all(
            readings, UserError(f"{_labels(readings)}: the process that tokenises failed: {error}")
        )
    connection.send(results)


def _labels(readings: Sequence[Reading]) -> str:
    return ", ".join(source.label for source, _ in readings)


def _all(readings: Sequence[Reading], error: UserError) -> Results:
    return {reading.key: error for reading in readings}


def _progress(label: str, connection: Connection) -> Progress:
    """Sends lines for people; ends this process once nobody waits for the results any more."""
    show = progress_lines(label, connection.send)

    def tell(done: int, size: int, records: int) -> None:
        if connection.poll():
            sys.exit(1)
        show(done, size, records)

    return tell


if __name__ == "__main__":
    work(Connection(sys.stdin.fileno()))
