"""The interface of executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Handle = Mapping[str, Any]
"""By which an executor finds an instance again, also one of a server that was restarted; the database keeps it."""


@dataclass(frozen=True)
class Launch:
    """An instance to be started.

    Attributes:
        name: Its own.
        words: Flags of `megatron-mux serve-instance`.
        processes: How many ranks.
        environment: Variables that only it gets.
        log: Where what it prints goes.
    """

    name: str
    words: Sequence[str]
    processes: int
    environment: Mapping[str, str]
    log: Path


class Executor(Protocol):
    """Has instances run somewhere. None of its methods waits for an instance."""

    def start(self, launch: Launch) -> Handle:
        """Start an instance.

        Raises:
            OSError: It cannot be started.
        """

    def stop(self, handle: Handle, kill: bool = False) -> None:
        """Ask an instance to save and end; with `kill` end it at once."""

    def exited(self, handle: Handle) -> bool:
        """Whether none of its processes is left."""
