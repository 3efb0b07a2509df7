"""How fast jobs train together in one instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Predicts the duration of a step in which every job of an instance does one of its own.

    A job's step alone has a part that does not grow with its tokens (launches, filling the pipeline, latency of
    collectives) and a part that does. Jobs that step together share the first part, which is the largest of theirs,
    and add up the second. Measured tables can replace this: override `joint_step`.

    Attributes:
        shared: The first part as a fraction of a step alone, 0 to 1. With 0.4 eight equal jobs train together 1.5 times
            as fast as one after another, and any number at most 1.67 times.
    """

    shared: float = 0.4

    def joint_step(self, backbone: str, seconds: Sequence[float]) -> float:
        """Seconds of a joint step of jobs whose steps alone take `seconds`; 0 without jobs."""
        if not seconds:
            return 0.0
        return self.shared * max(seconds) + (1 - self.shared) * sum(seconds)
