"""The best evaluation of a task so far, and how many have improved nothing since."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class BestEvaluation:
    """Compares a task's evaluations as `transformers`' Trainer and EarlyStoppingCallback do; a save holds it.

    Attributes:
        step: Optimizer steps before the best evaluation; 0 before the first.
        value: What it gave; None before the first.
        checkpoint: Directory of the adapter that gave it, as `SavedTask.checkpoint`; empty: none is kept.
        stale: Evaluations in a row that have improved nothing.
        metric: What is compared, such as `lowest loss`; empty before the first.
    """

    step: int = 0
    value: float | None = None
    checkpoint: str = ""
    stale: int = 0
    metric: str = ""

    def note(self, step: int, value: float, greater: bool, threshold: float) -> bool:
        """Compare an evaluation with the best one so far.

        Args:
            step: Optimizer steps done.
            value: The deciding figure; what is not finite is no improvement.
            greater: Whether a better adapter has it higher.
            threshold: By how much it must be better not to count as stale.

        Returns:
            Whether it is the best one now.
        """
        better = math.isfinite(value) and (
            self.value is None or (value > self.value if greater else value < self.value)
        )
        improves = better and (self.value is None or abs(value - self.value) > threshold)
        self.stale = 0 if improves else self.stale + 1
        if better:
            self.step, self.value = step, value
        return better
