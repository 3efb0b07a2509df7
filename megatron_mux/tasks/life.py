"""A task's life: its states, and which of them may follow which.

One `TaskLife` for each task of a run knows the task's state. The engine, admission and commands change it; saves, the
display and whoever else wants to know ask it. (A manifest keeps what the state was when the run was saved.)

    loading or joining -> waiting -> running <-> parked       (waiting may be left out)
    any of these       -> finished | failed | refused | removed | stopped
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

State = Literal[
    "loading",
    "joining",
    "waiting",
    "running",
    "parked",
    "finished",
    "failed",
    "refused",
    "removed",
    "stopped",
]
"""`loading`: its data, before the run begins; `joining`: the same while others train; `waiting`: for room in memory;
`parked`: it ran out of memory beside others, and goes on once one of them has left; `failed`: its loss or gradient was
not finite, or its data could not be read; `refused`: it cannot train here; `removed`: it left by command; `stopped`:
the run ended before it was done."""

Status = Literal["running", "finished", "failed"]
"""What the result of a step says of its task."""

_ENDS: tuple[State, ...] = ("finished", "failed", "refused", "removed", "stopped")
_NEXT: Mapping[State, tuple[State, ...]] = {
    "loading": ("waiting", "running", *_ENDS),
    "joining": ("waiting", "running", *_ENDS),
    "waiting": ("running", *_ENDS),
    "running": ("parked", *_ENDS),
    "parked": ("running", *_ENDS),
}


class TaskLife:
    """The state of one task.

    Args:
        state: In which it begins.

    Attributes:
        state: In which it is; only `to` changes it.
        reason: Why it is there, if it failed.
    """

    def __init__(self, state: State = "loading") -> None:
        self.state: State = state
        self.reason = ""

    def to(self, state: State, reason: str = "") -> None:
        """Go to another state.

        Raises:
            ValueError: That state cannot follow this one.
        """
        if state not in _NEXT.get(self.state, ()):
            raise ValueError(f"a task that is {self.state} cannot become {state}")
        self.state, self.reason = state, reason

    def end(self, state: State) -> None:
        """Go to one of the ends, unless an end is reached already: a task may be done when it is told to leave."""
        if not self.is_over:
            self.to(state)

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


class TaskLives(dict[str, TaskLife]):
    """The lives of a run's tasks, by name."""

    def begin(self, name: str, state: State) -> TaskLife:
        """Begin a task's life, also that of one of a name which was refused before."""
        life = self[name] = TaskLife(state)
        return life
