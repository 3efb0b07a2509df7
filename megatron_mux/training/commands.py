"""What a run can be told while it trains, and where commands come from.

A command that is impossible, such as to pause a task that is over, is refused in a line of the run's output; the run
goes on. Callbacks are told each change of a task's state (`Callback.state_changed`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron_mux.engine.agreement import computed_by_first
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec


@dataclass(frozen=True)
class Submit:
    """The tasks of a file are to join the run.

    Attributes:
        file: The file.
        continues: The directory of a task in another run, or this one: the one task of the file goes on from what was
            last saved of that. None: all begin anew.
    """

    file: Path
    continues: Path | None = None


@dataclass(frozen=True)
class Cancel:
    """A task is to leave, by its name; or all tasks of a file that was submitted, by its path.

    The state of one that has trained is saved before.
    """

    task_or_file: str | Path


@dataclass(frozen=True)
class Pause:
    """A task is to take no part in steps until it is resumed.

    It keeps its adapter, its optimizer's moments, its position in its data and its place in memory: once resumed, its
    steps are those that it would have done. Saves say that it is paused. A run that continues such a save keeps it
    paused if it is given a source of commands; else nobody could resume it, and it trains.
    """

    task: str


@dataclass(frozen=True)
class Resume:
    """A task that is paused is to train again. If there is no room for it by now, it waits."""

    task: str


@dataclass(frozen=True)
class Prune:
    """Tasks are to stop, as the scheduler of their sweep decided; by name, with the reason.

    They are saved together and leave memory; `Resume` lets one go on from there.
    """

    tasks: Mapping[str, str]


@dataclass(frozen=True)
class Add:
    """Tasks are to join the run whose data are known already, such as the next configurations of a sweep."""

    specs: Sequence[TaskSpec]


@dataclass(frozen=True)
class Tell:
    """Callbacks are to be told something, see `Callback.told`."""

    content: object


@dataclass(frozen=True)
class Drain:
    """The run is to end once its tasks are done or paused. It holds until commands are polled again."""


Command = Submit | Cancel | Pause | Resume | Prune | Add | Tell | Drain


class CommandSource(Protocol):
    """Where commands come from."""

    @property
    def awaited(self) -> str:
        """What an idle run waits for, in words."""

    def poll(self) -> Sequence[Command]:
        """What the run is told since the last call. Called between bursts of steps, and twice a second while idle."""


class OnlyDrain:
    """The source of a run that nobody commands. It ends once its first tasks are done."""

    awaited = ""

    def poll(self) -> Sequence[Command]:
        """See `CommandSource`."""
        return (Drain(),)


@dataclass(frozen=True)
class InTurn:
    """Several sources, each of which says the same on every rank, as one."""

    sources: Sequence[CommandSource]

    @property
    def awaited(self) -> str:
        """See `CommandSource`."""
        return " or ".join(filter(None, (source.awaited for source in self.sources)))

    def poll(self) -> Sequence[Command]:
        """See `CommandSource`."""
        return [command for source in self.sources for command in source.poll()]


class CommandQueue:
    """A source for whoever is in the same process: any thread puts commands, the run takes them between steps.

    A `Drain` holds from then on.
    """

    awaited = "commands"

    def __init__(self) -> None:
        self._waiting: deque[Command] = deque()
        self._drains = False

    def put(self, *commands: Command) -> None:
        """Have the run follow commands, in this order."""
        self._waiting.extend(commands)

    def poll(self) -> Sequence[Command]:
        """See `CommandSource`."""
        found = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._drains = self._drains or Drain() in found
        return [command for command in found if command != Drain()] + [Drain()] * self._drains


@dataclass
class SharedCommands:
    """Gives every rank the commands of the first rank's sources.

    Attributes:
        sources: Polled on the first rank only.
        parallel: Where this rank stands.
    """

    sources: Sequence[CommandSource]
    parallel: Parallel
    awaited: str = field(init=False)

    def __post_init__(self) -> None:
        self.awaited = " or ".join(source.awaited for source in self.sources)

    def poll(self) -> Sequence[Command]:
        """See `CommandSource`. Every rank calls it.

        Raises:
            SharedError: A source raised an exception; the first rank raises that.
        """
        return computed_by_first(self._poll, self.parallel)

    def _poll(self) -> list[Command]:
        return [command for source in self.sources for command in source.poll()]
