"""The median stopping rule (Golovin et al., Google Vizier, 2017, section 3.2.2)."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_mux.sweep.scheduler import Configuration, Decision, Scheduler
from megatron_mux.tasks.scheduler import LEAST_OTHERS


@dataclass(frozen=True)
class MedianStopping(Scheduler):
    """Stops a configuration whose best figure so far is worse than the median of the others' running means.

    It looks at every evaluation from `min_steps` on, once three others have got as far. Nobody who has stopped goes on.

    Args:
        min_steps: Before so many steps nobody is stopped.
    """

    min_steps: int

    interval = None

    def evaluation_steps(self, total_steps: int) -> Collection[int]:
        """None besides those of the tasks."""
        return ()

    def decide(
        self, configurations: Sequence[Configuration], arrived: Collection[str], more_to_come: bool = False
    ) -> list[Decision]:
        """See `Scheduler`."""
        decisions: list[Decision] = []
        for own in configurations:
            if own.name not in arrived or own.state != "open" or not own.values:
                continue
            step = max(own.values)
            means = [
                statistics.fmean(value for at, value in other.values.items() if at <= step)
                for other in configurations
                if other.name != own.name and other.values and min(other.values) <= step <= max(other.values)
            ]
            if step < self.min_steps or step >= own.total_steps or len(means) < LEAST_OTHERS:
                continue
            best, median = min(own.values.values()), statistics.median(means)
            if best > median:
                reason = f"its best figure is worse than the median of {len(means)} others at step {step}"
                decisions.append(Decision(own.name, "prune", reason))
        return decisions
