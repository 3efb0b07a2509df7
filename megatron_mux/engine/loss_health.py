"""Whether a task's loss goes its usual way: a loss may be far gone before it stops being finite."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

# Losses that are looked at together: their median does not follow a single batch.
_WINDOW = 5


@dataclass
class LossHealth:
    """What a task's losses tell of its adapter, each of it as it was before that step's update.

    A step is good if its loss is finite and at most 1 more than twice the lowest that the task has held: the lowest
    median of five losses in a row. That lets batches differ and a task unlearn a little, and tells a loss that has
    exploded: below 5 for a task that has been at 2, where a model that knows nothing is at 10 or 11.

    Attributes:
        good: Whether the last step was good; so it is before the first.
        lowest: The lowest median of five losses in a row; None before the fifth step.
        recent: The last losses, at most five.
    """

    good: bool = True
    lowest: float | None = None
    recent: list[float] = field(default_factory=list)

    def note(self, loss: float) -> None:
        """A step had this loss; one that is not finite stops the task and is the last."""
        if not math.isfinite(loss):
            self.good = False
            return
        self.recent = [*self.recent, loss][-_WINDOW:]
        usual = statistics.median_low(self.recent)
        if len(self.recent) == _WINDOW:
            self.lowest = usual if self.lowest is None else min(usual, self.lowest)
        self.good = loss <= 2 * (usual if self.lowest is None else self.lowest) + 1
