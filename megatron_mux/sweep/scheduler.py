"""The interface of schedulers, which compare the configurations of a sweep and stop the worse ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["open", "pruned", "over", "failed"]
"""`open`: it trains or is going to; `pruned`: a scheduler stopped it; `over`: it has trained to its end; `failed`: it
has ended otherwise."""


@dataclass(frozen=True)
class Configuration:
    """A configuration as a scheduler sees it.

    Attributes:
        name: Its task.
        total_steps: That it would train in full.
        values: The deciding figure by steps, lower is better; of what was not finite infinity.
    """

    name: str
    total_steps: int
    values: Mapping[int, float] = field(default_factory=dict)
    state: State = "open"


@dataclass(frozen=True)
class Decision:
    """What becomes of a configuration, and why."""

    name: str
    action: Literal["prune", "resume"]
    reason: str


class Scheduler(ABC):
    """Decides when configurations have been evaluated. Decisions follow from what it is given alone.

    Attributes:
        interval: Decisions fall after multiples of so many steps; None: whenever tasks are evaluated anyway.
    """

    interval: int | None

    @abstractmethod
    def evaluation_steps(self, total_steps: int) -> Collection[int]:
        """After how many steps a configuration has to be evaluated, whatever its `eval_steps`."""

    @abstractmethod
    def decide(
        self, configurations: Sequence[Configuration], arrived: Collection[str], more_to_come: bool = False
    ) -> list[Decision]:
        """Say who stops now and who, stopped before, goes on.

        Args:
            configurations: All of the sweep that have begun, or are to.
            arrived: Those that have just been evaluated; others that are open are left alone.
            more_to_come: Whether a sampler is going to choose more.
        """


def comparable(value: float | None) -> float:
    """A figure by which to sort: what is not finite is the worst."""
    return value if value is not None and math.isfinite(value) else math.inf


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd."""
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
