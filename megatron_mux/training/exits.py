"""Decides when a run saves and exits before its tasks are done, besides at a signal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_mux.training.callback import Callback
from megatron_mux.training.step_loop import Due


@dataclass
class Exits(Callback):
    """Follows `--exit-interval` and `--exit-duration-in-mins`.

    Ranks agree on `elapsed` and count the same steps, so that they decide alike without a further message.

    Attributes:
        interval: Exit when the run has done a multiple of so many steps; None: never.
        minutes: Exit after so many minutes; None: never.
        steps: Steps of the run, those before it was resumed included.
        elapsed: Seconds since the run began, when ranks last agreed on them.
    """

    interval: int | None
    minutes: float | None
    steps: int = 0
    elapsed: float = 0.0
    _at_interval: bool = False

    def after_steps(self, steps: int) -> None:
        """Count the steps of a burst."""
        self.steps += steps
        self._at_interval = self.interval is not None and self.steps % self.interval == 0

    def due(self, seconds: float) -> Iterator[Due]:
        """Yield in how many steps the run exits."""
        if self.interval is not None:
            yield self.interval - self.steps % self.interval, self.interval
        if self.minutes is not None and seconds:
            left = max(1, math.ceil((60 * self.minutes - self.elapsed) / seconds))
            yield left, left

    def reason_to_exit(self, elapsed: float, is_training: bool) -> str:
        """Why the run exits now; empty: it goes on."""
        self.elapsed = elapsed
        if self.minutes is not None and self.elapsed >= 60 * self.minutes:
            return f"after {self.minutes:g} minutes (--exit-duration-in-mins)"
        if self._at_interval and is_training:
            return f"after {self.steps} steps (--exit-interval {self.interval})"
        return ""
