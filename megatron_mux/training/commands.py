"""What a run can be told while it trains, and where commands come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Submit:
    """The tasks of a file are to join the run."""

    file: Path


@dataclass(frozen=True)
class Cancel:
    """The tasks of a file are to leave."""

    file: Path


@dataclass(frozen=True)
class Drain:
    """The run is to end once its tasks are done. It holds until commands are polled again."""


Command = Submit | Cancel | Drain


class CommandSource(Protocol):
    """Where commands come from."""

    @property
    def awaited(self) -> str:
        """What an idle run waits for, in words."""

    def poll(self) -> Sequence[Command]:
        """What the run is told since the last call. Every rank calls it and gets the same."""


class OnlyDrain:
    """The source of a run that nobody commands. It ends once its first tasks are done."""

    awaited = ""

    def poll(self) -> Sequence[Command]:
        """See `CommandSource`."""
        return (Drain(),)
