"""Runs the work of all sessions on one compute thread, as the scheduler admits it to memory.

The scheduler decides by reservations whose work may run (Menos, Algorithm 2). Admitted work is computed in that order;
where several sessions' work that can share a micro-batch is admitted at the same time, it is computed together, which
Menos, with a process for each client, could not.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from megatron_mux.split.server.scheduler import Demand, Scheduler


@dataclass(eq=False)
class Work:
    """Something to compute for a session.

    Attributes:
        client: Whose it is: the identity that the scheduler is fair to.
        run: Computes it, and all `work` given beside it that has the same `joins`; called on the compute thread.
        payload: What `run` needs to know of this one.
        size: Bytes to reserve while it runs; 0: it needs none, or has them already.
        keeps: Bytes of them that stay reserved afterwards, until `Dispatcher.release`.
        tokens: Rows that it computes.
        joins: Work with equal keys can be computed together; None: by itself.
        expected_s: How long it will probably take.
    """

    client: str
    run: Callable[[Sequence[Work]], Sequence[Any]]
    payload: Any = None
    size: int = 0
    keeps: int = 0
    tokens: int = 0
    joins: Hashable = None
    expected_s: float = 0.0
    key: int = field(default=0, init=False)
    submitted: float = field(default=0.0, init=False)
    future: asyncio.Future[Outcome] | None = field(default=None, init=False)
    abandoned: bool = field(default=False, init=False)


@dataclass(frozen=True)
class Outcome:
    """What work has come to.

    Attributes:
        result: What `run` returned for it.
        waited_s: From when it was submitted until it was computed.
        computed_s: How long that took, alone or together with others.
        together: How many were computed together.
        reservation: Names what stays reserved; 0: nothing.
    """

    result: Any
    waited_s: float
    computed_s: float
    together: int
    reservation: int


class Dispatcher:
    """Admits work to memory and computes it.

    Args:
        scheduler: Decides whose work is admitted.
        most_together: Most rows that are computed together; 0: work is computed one by one.
        observe: Called with the seconds of each of the scheduler's decisions.
        synchronize: Waits on the compute thread until the device has computed what was launched: else times are those
            of launches.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        most_together: int = 0,
        observe: Callable[[float], None] = lambda seconds: None,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.most_together = most_together
        self._observe = observe
        self._synchronize = synchronize
        self._keys = count(1)
        self._waiting: dict[int, Work] = {}
        self._ready: deque[Work] = deque()
        self._thread = ThreadPoolExecutor(1, "compute")
        self._busy = self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def queued(self) -> int:
        """Work that waits for memory or for its turn."""
        return len(self._waiting) + len(self._ready)

    @property
    def is_short(self) -> bool:
        """Whether some work waits for memory."""
        return bool(self._waiting)

    async def compute(self, work: Work) -> Outcome:
        """Wait for memory and for its turn, and compute it.

        A caller that is cancelled takes its work back unless it is being computed already.

        Raises:
            ValueError: It needs more memory than there is.
            Exception: What `run` raised.
        """
        work.key, work.submitted = next(self._keys), time.monotonic()
        work.future = asyncio.get_running_loop().create_future()
        if work.size:
            demand = Demand(
                work.key, work.client, work.size, work.tokens, work.joins, work.expected_s, work.keeps
            )
            self.scheduler.submit(demand, work.submitted)
            self._waiting[work.key] = work
            self._admit()
        else:  # what has its memory must not wait for those who may be waiting for that
            self._ready.append(work)
            self._next()
        try:
            return await asyncio.shield(work.future)
        except asyncio.CancelledError:
            work.abandoned = not self.take_back(work)
            if work.future.done() and work.future.exception() is None:
                self.release(work.future.result().reservation)  # nobody else knows of it
            raise

    def take_back(self, work: Work) -> bool:
        """Take work back unless it is being computed already; returns whether it was."""
        if self._waiting.pop(work.key, None) is not None:
            self.scheduler.cancel(work.key)
            self._admit()
        elif work in self._ready:
            self._ready.remove(work)
            if work.size:
                self.release(work.key)
        else:
            return False
        return True

    def shrink(self, reservation: int, size: int) -> None:
        """Make a reservation that outlasted its work smaller."""
        self.scheduler.shrink(reservation, size)
        self._admit()

    def release(self, reservation: int) -> None:
        """End a reservation that outlasted its work; 0 is none."""
        if reservation:
            self.scheduler.release(reservation, time.monotonic())
            self._admit()

    def close(self) -> None:
        """End the compute thread once it has done what it is doing."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(cancel_futures=True)

    def _admit(self) -> None:
        """Let the scheduler decide, and come back when it could decide otherwise without further events."""
        now = time.monotonic()
        granted = self.scheduler.grant(now)
        self._observe(time.monotonic() - now)
        for demand in granted:
            self._ready.append(self._waiting.pop(demand.key))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        later = self.scheduler.next_event(now)
        if later is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, later - now), self._admit)
        self._next()

    def _next(self) -> None:
        """Compute what is ready, unless something is being computed."""
        if self._busy or self._closed or not self._ready:
            return
        batch = self._batch()
        self._busy = True
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, self._timed, batch)
        running.add_done_callback(lambda done: self._finish(batch, done))

    def _batch(self) -> list[Work]:
        """The first that is ready, and those behind it that join it."""
        first = self._ready.popleft()
        batch, rows = [first], first.tokens
        if first.joins is None or not self.most_together:
            return batch
        for other in list(self._ready):
            if other.joins == first.joins and rows + other.tokens <= self.most_together:
                batch.append(other)
                rows += other.tokens
                self._ready.remove(other)
        return batch

    def _timed(self, batch: Sequence[Work]) -> tuple[float, float, Sequence[Any]]:
        began = time.monotonic()
        results = batch[0].run(batch)
        self._synchronize()
        return began, time.monotonic() - began, results

    def _finish(
        self, batch: Sequence[Work], done: asyncio.Future[tuple[float, float, Sequence[Any]]]
    ) -> None:
        self._busy = False
        error = done.exception()
        for i, work in enumerate(batch):
            keeps = 0 if error is not None or work.abandoned else work.keeps
            if work.size and not keeps:
                self.scheduler.release(work.key, time.monotonic())
            elif keeps < work.size:
                self.scheduler.shrink(work.key, keeps)
            assert work.future is not None
            if error is not None:
                work.future.set_exception(error)
                continue
            began, seconds, results = done.result()
            outcome = Outcome(
                results[i], began - work.submitted, seconds, len(batch), work.key if keeps else 0
            )
            work.future.set_result(outcome)
        self._admit()
