"""Asynchronous successive halving (ASHA; Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_mux.sweep.scheduler import Configuration, Decision, Scheduler, State, ordinal


@dataclass(frozen=True)
class Halving(Scheduler):
    """Lets one of `factor` configurations go on at each rung.

    Whoever reaches a rung is compared with all that have reached it so far, and stops unless it is among the best
    `1 / factor` of them. One that has stopped goes on once enough worse ones have come: nobody waits for others at a
    rung. Once nobody can come any more, the best one of a rung goes on however few there are, so that some
    configuration trains in full.

    Args:
        min_steps: The first rung; others are at its product with powers of `factor`.
        factor: At least 2.
    """

    min_steps: int
    factor: int

    @property
    def interval(self) -> int:  # type: ignore[override]
        """See `Scheduler`."""
        return self.min_steps

    def evaluation_steps(self, total_steps: int) -> Collection[int]:
        """The rungs below the end of a configuration."""
        return list(self._rungs(total_steps))

    def decide(
        self, configurations: Sequence[Configuration], arrived: Collection[str], more_to_come: bool = False
    ) -> list[Decision]:
        """See `Scheduler`."""
        now = {own.name: own for own in configurations}
        last = max((own.total_steps for own in configurations), default=0)
        decisions: dict[str, Decision] = {}
        for rung in self._rungs(last):
            for decision in self._at(rung, list(now.values()), arrived, more_to_come):
                decisions[decision.name] = decision
                state: State = "pruned" if decision.action == "prune" else "open"
                now[decision.name] = replace(now[decision.name], state=state)
        return list(decisions.values())

    def _at(
        self, rung: int, configurations: Sequence[Configuration], arrived: Collection[str], more_to_come: bool
    ) -> Iterator[Decision]:
        """Yield the decisions at one rung."""
        there = [own for own in configurations if rung in own.values]
        if not there:
            return
        coming = more_to_come or any(
            own.state == "open" and rung < own.total_steps and rung > max(own.values, default=0)
            for own in configurations
        )
        quota = max(len(there) // self.factor, 0 if coming else 1)
        able = [
            own for own in there if own.state != "failed" and (own.state != "over" or max(own.values) > rung)
        ]
        ranked = sorted(able, key=lambda own: own.values[rung])  # of equal ones the first in the file
        for place, own in enumerate(ranked, 1):
            if max(own.values) != rung:
                continue  # it has gone on
            goes_on = place <= quota
            go_on = "the best one goes on" if quota == 1 else f"the best {quota} go on"
            rank = f"{ordinal(place)} of {len(there)} at step {rung}"
            if own.state == "open" and own.name in arrived and not goes_on:
                yield Decision(own.name, "prune", f"{rank}, where {go_on if quota else 'nobody goes on yet'}")
            elif own.state == "pruned" and goes_on:
                yield Decision(own.name, "resume", f"{rank} by now, where {go_on}")

    def _rungs(self, total_steps: int) -> Iterator[int]:
        step = self.min_steps
        while step < total_steps:
            yield step
            step *= self.factor
