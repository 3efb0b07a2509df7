"""Decides how many steps run between two flushes of the pipeline, and which ones the schedule picture shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron_mux.pipeline.action import TimedAction
from megatron_mux.pipeline.execute import Timer

Result = TypeVar("Result")

_TIMED_BURSTS, _TIMED_STEPS = 2, 3
"""How many bursts are timed, and their most steps. The picture shows the last of them: the machine is warm by then."""

_MIN_STEPS, _MAX_STEPS = 4, 16
"""Steps of a burst: a flush costs little after the former, next to nothing after the latter."""

_MAX_SECONDS = 10.0
"""A burst of more than `_MIN_STEPS` takes at most so long: a signal waits until it ends."""

_MAX_SECONDS_WATCHING = 2.0
"""The same where tasks may join, which wait too; if a single step takes longer, a burst has one step."""


_UNKNOWN_SECONDS = 0.1
"""A step is taken to last so long before the first one."""

Due = tuple[int, int]
"""In how many steps an evaluation or a save is due, and after how many more again."""


class StepLoop:
    """Runs the engine's steps in bursts: the steps of a burst roll into each other without a flush between them.

    Args:
        rolling: Whether a burst may have more than one step.
        watching: Whether tasks may join between bursts.

    Attributes:
        steps: Steps done so far.
        seconds: A step of the last burst took so long on average; 0 before the first.
        timed: The actions of the burst that was timed last.
        timed_steps: The first and last step of that burst, from 1; zeros before the first burst.
    """

    def __init__(self, rolling: bool, watching: bool) -> None:
        self.rolling = rolling
        self.watching = watching
        self.steps = 0
        self.seconds = 0.0
        self.timed: list[TimedAction] = []
        self.timed_steps = (0, 0)
        self._bursts = 0

    def max_steps(self, due: Iterable[int]) -> int:
        """The largest number of steps for the next burst.

        A function of `seconds`, on which all ranks must agree before.

        Args:
            due: In how many steps each evaluation or save is due; the burst ends at the first.
        """
        return self._most(self._bursts, self.seconds, due)

    def next_max_steps(self, due: Iterable[Due]) -> int:
        """The largest number of steps for the burst after the next one, as far as can be told by now.

        Args:
            due: The evaluations and saves that end a burst.
        """
        due = list(due)
        steps = self.max_steps(left for left, _ in due)
        later = (left - steps if left > steps else interval for left, interval in due)
        return self._most(self._bursts + 1, self.seconds or _UNKNOWN_SECONDS, later)

    def _most(self, bursts: int, seconds: float, due: Iterable[int]) -> int:
        """The largest number of steps after so many bursts, if a step takes that long."""
        if not self.rolling or not seconds:
            return 1
        longest, least = (_MAX_SECONDS_WATCHING, 1) if self.watching else (_MAX_SECONDS, _MIN_STEPS)
        steps = min(_MAX_STEPS, max(least, int(longest / seconds)))
        if bursts < _TIMED_BURSTS:
            steps = min(steps, _TIMED_STEPS)
        return max(1, min([steps, *due]))

    def run_burst(
        self, steps: Callable[[int, Timer | None], list[Result]], due: Iterable[int]
    ) -> list[Result]:
        """Run a burst.

        Args:
            steps: Runs at least one step and at most the given number; calls the timer, if any, after each action.
            due: See `max_steps`.

        Returns:
            The result of each step.
        """
        timing = self._bursts < _TIMED_BURSTS
        if timing:
            self.timed = []
        start = time.perf_counter()
        results = steps(self.max_steps(due), self.timed.append if timing else None)
        self.seconds = (time.perf_counter() - start) / len(results)
        if timing:
            self.timed_steps = (self.steps + 1, self.steps + len(results))
        self.steps += len(results)
        self._bursts += 1
        return results

    @property
    def has_timed(self) -> bool:
        """Whether the last burst was timed."""
        return self._bursts <= _TIMED_BURSTS

    @property
    def is_time_to_draw(self) -> bool:
        """Whether the last burst was the one that the picture shows."""
        return self._bursts == _TIMED_BURSTS
