"""Turns: how many steps the engine takes before the loop looks up, and which of them are pictured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron_mux.pipeline.action import TimedAction
from megatron_mux.pipeline.execute import Timer

Result = TypeVar("Result")

_PICTURED_TURN, _PICTURED_STEPS = 2, 3
"""Which turn is kept for the picture of the schedule, the machine being warm by then, and how many steps of it."""

_LEAST_STEPS, _MOST_STEPS = 4, 16
"""Steps between two flushes of the pipeline: what one costs is little after the former, next to nothing after the
latter."""

_MOST_SECONDS = 10.0
"""How long more than the least may take: until then a signal waits."""

_MOST_SECONDS_WATCHING = 2.0
"""The same where tasks may join, and wait as well; a turn has one step then, if a step takes longer."""


class Turns:
    """Counts steps, and how long they take.

    Args:
        rolling: Whether steps may follow each other without a flush of the pipeline.
        watching: Whether tasks may join between turns.

    Attributes:
        steps: Taken so far.
        seconds: Of a step of the last turn; 0 before the first.
        timed: Actions of the turn that is pictured, or of the only one so far.
        pictured: The first and last of its steps, from 1; zeros before the first.
    """

    def __init__(self, rolling: bool, watching: bool) -> None:
        self.rolling = rolling
        self.watching = watching
        self.steps = 0
        self.seconds = 0.0
        self.timed: list[TimedAction] = []
        self.pictured = (0, 0)
        self._done = 0

    def most(self, due: Iterable[int]) -> int:
        """Steps of the next turn, at the most; a function of `seconds`, which ranks have to agree on.

        Args:
            due: In how many steps something is to be done; the turn ends there.
        """
        if not self.rolling or not self.seconds:
            return 1
        seconds, least = (_MOST_SECONDS_WATCHING, 1) if self.watching else (_MOST_SECONDS, _LEAST_STEPS)
        most = min(_MOST_STEPS, max(least, int(seconds / self.seconds)))
        if self._done < _PICTURED_TURN:
            most = min(most, _PICTURED_STEPS)
        return max(1, min([most, *due]))

    def take(self, steps: Callable[[int, Timer | None], list[Result]], due: Iterable[int]) -> list[Result]:
        """Take a turn.

        Args:
            steps: Takes so many steps at the most, at least one; told whom to tell of each action.
            due: See `most`.

        Returns:
            What each step gave.
        """
        pictured = self._done < _PICTURED_TURN
        if pictured:
            self.timed = []
        start = time.perf_counter()
        results = steps(self.most(due), self.timed.append if pictured else None)
        self.seconds = (time.perf_counter() - start) / len(results)
        if pictured:
            self.pictured = (self.steps + 1, self.steps + len(results))
        self.steps += len(results)
        self._done += 1
        return results

    @property
    def is_time_to_draw(self) -> bool:
        """Whether the turn just taken is the one that is pictured."""
        return self._done == _PICTURED_TURN
