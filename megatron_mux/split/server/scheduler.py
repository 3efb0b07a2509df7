"""Decides whose requests get memory: first come first served with backfilling (Menos, Algorithm 2), and options.

It is data without a clock: the caller says what time it is, in seconds. It knows of memory only what is reserved, and
never reserves more than there is. Every demand is granted in the end if every reservation ends: whoever reserves memory
and waits for more before it releases the first must make sure that the second fits beside all such reservations.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import count

import numpy as np


@dataclass(frozen=True)
class Demand:
    """A request for memory.

    Attributes:
        key: Its name; no two demands that wait or have reservations share one.
        client: The client that sent it.
        size: Bytes to reserve.
        tokens: Rows that it computes, which weights and rate limits count.
        joins: Requests with equal values can be computed together.
        expected_s: How long it will probably run.
        keeps: Bytes that stay reserved when it has run.
    """

    key: int
    client: str
    size: int
    tokens: int = 0
    joins: Hashable = None
    expected_s: float = 0.0
    keeps: int = 0


@dataclass(frozen=True)
class SchedulerOptions:
    """What departs from the paper's algorithm.

    Attributes:
        easy: Reserve for the first in the queue the time when enough memory will be free by expected ends; others may
            start before it if that does not delay it. The paper's rule holds once that time has passed or where it is
            unknown: others may pass only in a decision that grants the first one.
        weights: Shares of clients, 1 for those not named: the queue is in the order of weighted fair queueing. None: in
            the order of arrival.
        ageing: With weights, how many tokens of another client a second of waiting outweighs: the larger, the nearer to
            the order of arrival.
        rate: Tokens a second of each client, and a second's worth at once after a pause; demands beyond that join the
            queue later. None: no limit.

    Raises:
        ValueError: A weight or the rate is not above 0, or `ageing` is below 0.
    """

    easy: bool = False
    weights: Mapping[str, float] | None = None
    ageing: float = 0.0
    rate: float | None = None

    def __post_init__(self) -> None:
        positive = [*(self.weights or {}).values(), *([] if self.rate is None else [self.rate])]
        if not all(0 < value < math.inf for value in positive) or not 0 <= self.ageing < math.inf:
            raise ValueError("weights and the rate must be above 0, and ageing at least 0")


@dataclass
class _Reservation:
    """Bytes that are reserved, and when they will probably be free; None: nobody knows."""

    size: int
    until: float | None


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
        self._ends: list[tuple[float, int, int]] = []  # sorted: expected end, key, bytes that it frees
        # The queue in order: what it is ordered by; of demands what is searched as a whole, and themselves.
        self._ranks: list[tuple[float, int]] = []
        self._sizes, self._keeps, self._seconds = array("q"), array("q"), array("d")
        self._queue: list[Demand] = []
        self._rank_of: dict[int, tuple[float, int]] = {}
        self._later: list[tuple[float, int, Demand]] = []  # heap: when its rate limit lets it into the queue
        self._arrivals, self._entries = count(), count()
        self._paid_at: dict[str, float] = {}  # when the rate limit will have paid for all demands of a client
        self._virtual = 0.0  # start tag of the last demand that was granted in its turn
        self._tags: dict[int, tuple[float, float]] = {}  # start and finish tags of demands in the queue
        self._finish: dict[str, float] = {}  # finish tag of each client's last demand
        self._promised: tuple[int | None, float] = (
            None,
            0.0,
        )  # key of the first in the queue, its reserved start

    @property
    def waiting(self) -> int:
        """Demands that are not granted yet."""
        return len(self._queue) + len(self._later)

    @property
    def reserved(self) -> int:
        """Bytes that are reserved."""
        return self.capacity - self.free

    def has_reserved(self, key: int) -> bool:
        """Whether a demand was granted, and its reservation has not ended."""
        return key in self._reserved

    def submit(self, demand: Demand, now: float) -> None:
        """Ask for memory.

        Raises:
            ValueError: The demand is larger than the capacity.
        """
        if demand.size > self.capacity:
            raise ValueError(f"{demand.size} bytes are more than the {self.capacity} that there are")
        start = now
        if self.options.rate is not None:
            paid_at = max(now, self._paid_at.get(demand.client, now))
            self._paid_at[demand.client] = paid_at + demand.tokens / self.options.rate
            start = max(now, paid_at - 1.0)
        if start > now:
            heapq.heappush(self._later, (start, next(self._arrivals), demand))
        else:
            self._enter(demand, now)

    def cancel(self, key: int) -> None:
        """Take back a demand that is not granted yet; it does not count for weights and rate limits.

        Raises:
            KeyError: It does not wait.
        """
        rank = self._rank_of.get(key)
        if rank is not None:
            start, finish = self._tags.get(key, (0.0, 0.0))
            demand = self._take(bisect_left(self._ranks, rank))
            if self._finish.get(demand.client) == finish:
                self._finish[demand.client] = start
        else:
            at = {entry[2].key: i for i, entry in enumerate(self._later)}[key]
            demand = self._later.pop(at)[2]
            heapq.heapify(self._later)
        if self.options.rate is not None:
            self._paid_at[demand.client] -= demand.tokens / self.options.rate

    def release(self, key: int, now: float) -> None:
        """End a reservation."""
        self.shrink(key, 0)
        del self._reserved[key]

    def shrink(self, key: int, size: int) -> None:
        """Make a reservation smaller; the rest of it stays for an unknown time.

        Raises:
            ValueError: It is smaller already.
        """
        reservation = self._reserved[key]
        if size > reservation.size:
            raise ValueError(f"a reservation of {reservation.size} bytes cannot become {size}")
        if reservation.until is not None:
            del self._ends[bisect_left(self._ends, (reservation.until, key))]
        self.free += reservation.size - size
        reservation.size, reservation.until = size, None

    def grant(self, now: float) -> list[Demand]:
        """Grant what can be granted now, in order; their memory is reserved from then on."""
        while self._later and self._later[0][0] <= now:
            start, _, demand = heapq.heappop(self._later)
            self._enter(demand, start)
        granted: list[Demand] = []
        while self._queue and self._sizes[0] <= self.free:
            self._virtual = max(self._virtual, self._tags.get(self._queue[0].key, (0.0, 0.0))[0])
            granted.append(self._reserve(0, now))
        if not self._queue:
            return granted
        start, spare = self._reservation_of_first(now) if self.options.easy else (math.inf, self.capacity)
        if start < math.inf or granted:
            granted += self._backfill(now, start, spare)
        return granted

    def next_event(self, now: float) -> float | None:
        """When a rate limit makes another decision possible; None: only further calls do."""
        return self._later[0][0] if self._later else None

    def _enter(self, demand: Demand, now: float) -> None:
        """Put a demand into the queue.

        With weights the queue is in the order of start tags (Goyal et al., 1996) less age. All demands grow older at
        the same speed, so the time of entry stands for age.
        """
        tag = 0.0
        if self.options.weights is not None:
            start = max(self._virtual, self._finish.get(demand.client, 0.0))
            share = self.options.weights.get(demand.client, 1.0)
            self._finish[demand.client] = start + max(demand.tokens, 1) / share
            self._tags[demand.key] = start, self._finish[demand.client]
            tag = start + self.options.ageing * now
        rank = tag, next(self._entries)
        at = bisect_right(self._ranks, rank)
        self._rank_of[demand.key] = rank
        self._ranks.insert(at, rank)
        self._sizes.insert(at, demand.size)
        self._keeps.insert(at, demand.keeps)
        self._seconds.insert(at, demand.expected_s)
        self._queue.insert(at, demand)

    def _backfill(self, now: float, start: float, spare: int) -> list[Demand]:
        """Grant what fits, in order, if what it has reserved at `start` fits into what is spare then."""
        sizes = np.array(self._sizes)
        places = np.flatnonzero(sizes <= self.free)
        sizes, keeps, seconds = (np.array(values)[places] for values in (sizes, self._keeps, self._seconds))
        held = np.where(now + seconds <= start, keeps, sizes)
        granted: list[Demand] = []
        left = np.flatnonzero(held <= spare)
        while left.size:
            at, left = left[0], left[1:]
            spare -= int(held[at])
            granted.append(self._reserve(int(places[at]) - len(granted), now))
            # What does not fit now will not fit later in this decision.
            left = left[(sizes[left] <= self.free) & (held[left] <= spare)]
        return granted

    def _reservation_of_first(self, now: float) -> tuple[float, int]:
        """When the first in the queue will fit, by expected ends, and how much will be free beside it then.

        Never, and everything, if that is unknown, or later than it was before: then ends cannot be relied on.
        """
        first, free = self._queue[0], self.free
        start = math.inf
        for until, _, size in self._ends:
            free += size
            if free >= first.size:
                start = max(now, until)
                break
        promised = self._promised[1] if self._promised[0] == first.key else math.inf
        self._promised = first.key, min(start, promised)
        if start > promised or start == math.inf:
            return math.inf, self.capacity
        return start, free - first.size

    def _reserve(self, at: int, now: float) -> Demand:
        demand = self._take(at)
        until = now + demand.expected_s
        self.free -= demand.size
        self._reserved[demand.key] = _Reservation(demand.size, until)
        insort(self._ends, (until, demand.key, demand.size - demand.keeps))
        return demand

    def _take(self, at: int) -> Demand:
        demand = self._queue.pop(at)
        del self._ranks[at], self._sizes[at], self._keeps[at], self._seconds[at], self._rank_of[demand.key]
        self._tags.pop(demand.key, None)
        return demand
