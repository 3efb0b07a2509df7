"""Decides whose requests get memory: first come first served with backfilling (Menos, Algorithm 2), and options.

It is data without a clock: whoever calls it says what time it is, in seconds. Reservations are all it knows of memory,
so it never grants more than there is.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Demand:
    """A request for memory.

    Attributes:
        key: Names it.
        client: Whose it is.
        size: Bytes to reserve.
        tokens: Rows that it computes: what weights and rate limits count.
        joins: Requests with equal values can be computed together.
        expected_s: How long it will probably be computed.
    """

    key: int
    client: str
    size: int
    tokens: int = 0
    joins: Hashable = None
    expected_s: float = 0.0


@dataclass(frozen=True)
class SchedulerOptions:
    """What departs from the paper's algorithm.

    Attributes:
        easy: The first in the queue has a reservation for when, by expected ends, enough memory will be free; others
            may start before it if that does not delay it. The paper lets others pass only when the first one fits.
        weights: Shares of clients, 1 for those not named: the queue is in the order of weighted fair queueing. None: in
            the order of arrival.
        ageing: With weights, how many tokens of another client a second of waiting outweighs: the larger, the nearer to
            the order of arrival.
        rate: Most tokens a second of each client; what is beyond joins the queue later. None: no limit.
    """

    easy: bool = False
    weights: Mapping[str, float] | None = None
    ageing: float = 0.0
    rate: float | None = None


@dataclass
class _Reservation:
    """Bytes that are reserved, and when they will probably be free."""

    size: int
    until: float


class Scheduler:
    """Grants memory.

    Args:
        capacity: Bytes that there are.
        options: See `SchedulerOptions`.

    Attributes:
        free: Bytes that nobody has reserved.
    """

    def __init__(self, capacity: int, options: SchedulerOptions = SchedulerOptions()) -> None:
        self.capacity = self.free = capacity
        self.options = options
        self._reserved: dict[int, _Reservation] = {}
        # The queue in order: what it is ordered by, sizes and expected seconds (searched as a whole), and demands.
        self._ranks: list[tuple[float, int]] = []
        self._sizes, self._seconds = array("q"), array("d")
        self._queue: list[Demand] = []
        self._rank_of: dict[int, tuple[float, int]] = {}
        self._starts: dict[int, float] = {}
        self._later: list[tuple[float, int, Demand]] = []
        self._arrivals = 0
        self._virtual = 0.0
        self._finish: dict[str, float] = {}
        self._next_start: dict[str, float] = {}

    @property
    def waiting(self) -> int:
        """Demands that are not granted yet."""
        return len(self._rank_of)

    def has_reserved(self, key: int) -> bool:
        """Whether a demand was granted, and its reservation has not ended."""
        return key in self._reserved

    def submit(self, demand: Demand, now: float) -> None:
        """Ask for memory.

        Raises:
            ValueError: There is not so much memory.
        """
        if demand.size > self.capacity:
            raise ValueError(f"{demand.size} bytes are more than the {self.capacity} that there are")
        self._arrivals += 1
        rank = self._rank(demand, now), self._arrivals
        self._rank_of[demand.key] = rank
        start = now
        if self.options.rate is not None:
            start = max(now, self._next_start.get(demand.client, now))
            self._next_start[demand.client] = start + demand.tokens / self.options.rate
        if start > now:
            heapq.heappush(self._later, (start, self._arrivals, demand))
        else:
            self._enqueue(demand, rank)

    def _rank(self, demand: Demand, now: float) -> float:
        """What the queue is ordered by: start tags of weighted fair queueing (Goyal et al., 1996), plus age.

        All demands grow older at the same speed, so the time of arrival stands for age.
        """
        if self.options.weights is None:
            return 0.0
        start = max(self._virtual, self._finish.get(demand.client, 0.0))
        share = self.options.weights.get(demand.client, 1.0)
        self._finish[demand.client] = start + max(demand.tokens, 1) / share
        self._starts[demand.key] = start
        return start + self.options.ageing * now

    def _enqueue(self, demand: Demand, rank: tuple[float, int]) -> None:
        at = bisect_right(self._ranks, rank)
        self._ranks.insert(at, rank)
        self._sizes.insert(at, demand.size)
        self._seconds.insert(at, demand.expected_s)
        self._queue.insert(at, demand)

    def cancel(self, key: int) -> None:
        """Take back a demand that is not granted yet."""
        rank = self._rank_of.pop(key)
        self._starts.pop(key, None)
        at = bisect_right(self._ranks, rank) - 1
        if at >= 0 and self._queue[at].key == key:
            self._take(at)
        else:
            self._later = [entry for entry in self._later if entry[2].key != key]
            heapq.heapify(self._later)

    def release(self, key: int, now: float) -> None:
        """End a reservation."""
        self.free += self._reserved.pop(key).size

    def shrink(self, key: int, size: int) -> None:
        """Make a reservation smaller: so much of it stays for an unknown time."""
        reservation = self._reserved[key]
        if size > reservation.size:
            raise ValueError(f"a reservation of {reservation.size} bytes cannot become {size}")
        self.free += reservation.size - size
        reservation.size, reservation.until = size, math.inf

    def grant(self, now: float) -> list[Demand]:
        """Grant what can be granted now, in order; their memory is reserved from then on."""
        while self._later and self._later[0][0] <= now:
            demand = heapq.heappop(self._later)[2]
            self._enqueue(demand, self._rank_of[demand.key])
        granted: list[Demand] = []
        while self._queue and self._sizes[0] <= self.free:
            granted.append(self._reserve(0, now))
        if not self._queue:
            return granted
        if self.options.easy:
            granted += self._backfill_easy(now)
        elif granted:
            granted += self._backfill(now)
        return granted

    def next_event(self, now: float) -> float | None:
        """When a rate limit makes another decision possible; None: only further calls do."""
        return self._later[0][0] if self._later else None

    def _backfill(self, now: float) -> list[Demand]:
        """Grant what fits, whatever its place in the queue."""
        granted = []
        while (fits := np.flatnonzero(np.array(self._sizes) <= self.free)).size:
            granted.append(self._reserve(int(fits[0]), now))
        return granted

    def _backfill_easy(self, now: float) -> list[Demand]:
        """Grant what fits without delaying the first in the queue beyond its reservation."""
        granted: list[Demand] = []
        start, spare = self._reservation_of_first(now)
        while True:
            sizes, ends = np.array(self._sizes), now + np.array(self._seconds)
            fits = np.flatnonzero((sizes <= self.free) & ((ends <= start) | (sizes <= spare)))
            if not fits.size:
                return granted
            at = int(fits[0])
            if ends[at] > start:
                spare -= int(sizes[at])
            granted.append(self._reserve(at, now))

    def _reservation_of_first(self, now: float) -> tuple[float, int]:
        """When the first in the queue will fit, by expected ends, and how much will be left beside it then."""
        free, wanted = self.free, self._sizes[0]
        for reservation in sorted(self._reserved.values(), key=lambda own: own.until):
            free += reservation.size
            if free >= wanted:
                return max(now, reservation.until), free - wanted
        return math.inf, 0

    def _reserve(self, at: int, now: float) -> Demand:
        demand = self._take(at)
        del self._rank_of[demand.key]
        self.free -= demand.size
        self._reserved[demand.key] = _Reservation(demand.size, now + demand.expected_s)
        self._virtual = max(self._virtual, self._starts.pop(demand.key, 0.0))
        return demand

    def _take(self, at: int) -> Demand:
        del self._ranks[at]
        del self._sizes[at], self._seconds[at]
        return self._queue.pop(at)
