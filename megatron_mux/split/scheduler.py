"""interim"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    key: int
    client: str
    size: int
    tokens: int = 0
    joins: Hashable = None
    expected_s: float = 0.0


@dataclass(frozen=True)
class SchedulerOptions:
    easy: bool = False
    ageing: float = 0.0
    weights: object = None
    rate: float | None = None


class Scheduler:
    def __init__(self, capacity: int, options: SchedulerOptions = SchedulerOptions()) -> None:
        self.capacity = capacity
        self.free = capacity
        self._waiting: dict[int, Demand] = {}
        self._reserved: dict[int, int] = {}

    def submit(self, demand: Demand, now: float) -> None:
        if demand.size > self.capacity:
            raise ValueError(f"{demand.size} bytes are more than the {self.capacity} there are")
        self._waiting[demand.key] = demand

    def cancel(self, key: int) -> None:
        self._waiting.pop(key, None)

    def release(self, key: int, now: float) -> None:
        self.free += self._reserved.pop(key)

    def shrink(self, key: int, size: int) -> None:
        self.free += self._reserved[key] - size
        self._reserved[key] = size

    def grant(self, now: float) -> list[Demand]:
        granted: list[Demand] = []
        for demand in list(self._waiting.values()):
            if demand.size <= self.free:
                self.free -= demand.size
                self._reserved[demand.key] = demand.size
                granted.append(self._waiting.pop(demand.key))
            elif not granted:
                break
        return granted

    def next_event(self, now: float) -> float | None:
        return None
