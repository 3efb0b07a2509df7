"""A task's life: its states, and which of them may follow which.

One `TaskLife` for each task of a run knows the task's state. The engine, admission and commands change it; saves, the
display and whoever else wants to know ask it. (A manifest keeps what the state was when the run was saved.)

    loading or joining           -> waiting -> running <-> parked       (waiting may be left out)
    loading, waiting or paused   -> pruned                              (what a continued run does of a save)
    waiting, running or parked   -> paused  -> waiting or running
    running or parked            -> pruned  -> waiting or running
    any of these                 -> finished | failed | refused | removed | stopped
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

State = Literal[
    "loading",
    "joining",
    "waiting",
    "running",
    "parked",
    "paused",
    "pruned",
    "finished",
    "failed",
    "refused",
    "removed",
    "stopped",
]
"""`loading`: its data, before the run begins; `joining`: the same while others train; `waiting`: for room in memory;
`parked`: it ran out of memory beside others, and goes on once one of them has left; `paused`: by
command, until another one resumes it; `pruned`: its scheduler stopped it, and may let it go on if it turns out to be
among the better ones; `failed`: its loss or gradient was not finite, or it had no memory even alone;
`refused`: it cannot train here; `removed`: it left by command; `stopped`: the run ended before it was done."""

Status = Literal["running", "finished", "failed"]
"""What the result of a step says of its task."""

_ENDS: tuple[State, ...] = ("finished", "failed", "refused", "removed", "stopped")
_NEXT: Mapping[State, tuple[State, ...]] = {
    "loading": ("waiting", "running", "pruned", *_ENDS),
    "joining": ("waiting", "running", *_ENDS),
    "waiting": ("running", "paused", "pruned", *_ENDS),
    "running": ("parked", "paused", "pruned", *_ENDS),
    "parked": ("running", "paused", "pruned", *_ENDS),
    "paused": ("waiting", "running", "pruned", *_ENDS),
    "pruned": ("waiting", "running", *_ENDS),
}
_BEGUN: tuple[State, ...] = ("running", "parked", "paused", "pruned", "finished", "failed")
_SAVED: tuple[State, ...] = ("paused", "pruned", "finished", "failed", "refused", "removed")
"""States that a save knows by their names; the others are `running` there."""


class StateChange(NamedTuple):
    """A task's state has changed.

    Attributes:
        name: The task.
        old: Its state before; None: its life begins.
        new: Its state.
        reason: Why, if it failed, was refused or pruned; else empty.
    """

    name: str
    old: State | None
    new: State
    reason: str


class TaskLife:
    """The state of one task.

    Args:
        state: In which it begins.
        on_change: Called after each change with the state before, the new one and the reason.

    Attributes:
        state: In which it is; only `to` changes it.
        reason: Why it is there, if it failed, was refused or pruned.
        has_begun: Whether the run has begun to train it, or has paused it before it did.
    """

    def __init__(
        self, state: State = "loading", on_change: Callable[[State, State, str], None] | None = None
    ) -> None:
        self.state: State = state
        self.reason = ""
        self.has_begun = state in _BEGUN
        self._on_change = on_change

    def to(self, state: State, reason: str = "") -> None:
        """Go to another state.

        Raises:
            ValueError: That state cannot follow this one.
        """
        if not self.can_become(state):
            raise ValueError(f"a task that is {self.state} cannot become {state}")
        old, self.state, self.reason = self.state, state, reason
        self.has_begun = self.has_begun or state in _BEGUN
        if self._on_change is not None:
            self._on_change(old, state, reason)

    def end(self, state: State, reason: str = "") -> None:
        """Go to one of the ends, unless an end is reached already: a task may be done when it is told to leave."""
        if not self.is_over:
            self.to(state, reason)

    def can_become(self, state: State) -> bool:
        """Whether that state can follow this one."""
        return state in _NEXT.get(self.state, ())

    @property
    def trains(self) -> bool:
        """Whether it is registered with the engine and has steps to do."""
        return self.state in ("running", "parked")

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self.state in _ENDS

    @property
    def status(self) -> Status:
        """Its status in results of steps."""
        return self.state if self.state in ("finished", "failed") else "running"

    def saved_status(self, before: str) -> str:
        """Its status in a save; `before`, what the save that is continued says, until the task has begun."""
        if not self.has_begun:
            return before
        return self.state if self.state in _SAVED else "running"


class TaskLives(dict[str, TaskLife]):
    """The lives of a run's tasks, by name.

    Attributes:
        changes: Changes of their states that have not been told yet, in their order; whoever tells them empties it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[StateChange] = []

    def begin(self, name: str, state: State) -> TaskLife:
        """Begin a task's life, also that of one of a name which was refused before."""

        def note(old: State | None, new: State, reason: str) -> None:
            self.changes.append(StateChange(name, old, new, reason))

        life = self[name] = TaskLife(state, note)
        note(None, state, "")
        return life
