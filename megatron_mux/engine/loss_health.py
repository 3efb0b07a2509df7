"""Judges by its losses whether a task has diverged: a loss may explode long before it stops being finite."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

# Losses whose median is taken, so that a single batch does not count.
_WINDOW = 5


@dataclass
class LossHealth:
    """Follows a task's losses; each tells of the adapter as it was before that step's update.

    A step is good if its loss is finite and at most `lowest + |lowest| + 1`, where `lowest` is the lowest median of
    five losses in a row. Batches may differ and a task may unlearn a little, yet a loss that has exploded stands out:
    the bound is 5 for a task that has been at 2, where a model that knows nothing is at 10 or 11. Preference losses
    may be negative: the bound is 1 for a task that has been at -9.

    Attributes:
        good: Whether the last step was good; True before the first.
        lowest: The lowest median of five losses in a row; None before the fifth step.
        recent: The last losses, at most five.
    """

    good: bool = True
    lowest: float | None = None
    recent: list[float] = field(default_factory=list)

    def note(self, loss: float) -> None:
        """Count a step's loss; one that is not finite stops the task and is the last."""
        if not math.isfinite(loss):
            self.good = False
            return
        self.recent = [*self.recent, loss][-_WINDOW:]
        usual = statistics.median_low(self.recent)
        if len(self.recent) == _WINDOW:
            self.lowest = usual if self.lowest is None else min(usual, self.lowest)
        lowest = usual if self.lowest is None else self.lowest
        self.good = loss <= lowest + abs(lowest) + 1
