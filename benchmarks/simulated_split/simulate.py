"""Simulates a split server with thousands of clients, by measured costs and the server's own scheduler and policies.

What is simulated is time and memory: sessions arrive, send requests over links of their own, wait, are computed on one
thread, drop out and come back. Nothing is computed for real. The server's own link is taken to be fast enough for all.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from benchmarks.simulated_split.fleet import (
    Client,
    Costs,
    Figures,
    Fleet,
    Part,
    ServerOptions,
    make_clients,
)
from megatron_mux.split.server.policies import Circumstances, ForwardPlan, plan_forward
from megatron_mux.split.server.scheduler import Demand, Scheduler


@dataclass(eq=False)
class _Job:
    """Something for the compute thread.

    Attributes:
        client: Whose it is.
        call_s, rows_s: Its seconds: those that a micro-batch pays once, and those of its rows.
        then: Called with its reservation when it is done.
        joins: Jobs with equal values can be computed together; None: by itself.
        keeps: Bytes of its reservation that stay.
        part: Of the client's step, what its seconds count as; None: it belongs to no step.
        key: Its reservation; 0: none.
        since: When it was submitted.
    """

    client: Client
    call_s: float
    rows_s: float
    then: Callable[[int], None]
    joins: str | None = None
    keeps: int = 0
    part: Part | None = Part.COMPUTATION
    key: int = field(default=0, init=False)
    since: float = field(default=0.0, init=False)


class Simulation:
    """One run.

    Sessions are let in, in the order in which they come, while the largest request of any client fits beside what all
    sessions inside may hold: else they could wait for each other's memory for ever.

    Args:
        costs: Of the server's requests.
        fleet: The clients.
        options: The server.

    Raises:
        ValueError: A client does not fit into memory.
    """

    def __init__(self, costs: Costs, fleet: Fleet, options: ServerOptions) -> None:
        self.costs, self.fleet, self.options = costs, fleet, options
        self._random = np.random.default_rng(fleet.seed)
        self._clients = make_clients(fleet, costs, self._random)
        self._scheduler = Scheduler(options.capacity, options.scheduler)
        self._copies = options.policy == "vanilla"
        self._largest = max(client.memory.most(client.rows) for client in self._clients)
        needed = max(map(self._whole, self._clients)) if self._copies else self._largest
        if not self._copies:
            needed += max(client.memory.standing for client in self._clients)
        if needed > options.capacity:
            raise ValueError(f"a client needs {needed} bytes, and the server has {options.capacity}")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._keys = count(), count(1)
        self._now, self._wakes = 0.0, math.inf
        self._outside: deque[Client] = deque()
        self._standing = 0  # bytes that the sessions inside may hold
        self._idle: dict[str, Client] = {}  # of vanilla: tasks in memory, between two steps
        self._leaving = 0  # of vanilla: bytes of tasks that are on their way to host memory
        self._waiting: dict[int, _Job] = {}
        self._ready: dict[str | None, deque[tuple[int, _Job]]] = {
            joins: deque() for joins in (None, "forward", "backward")
        }
        self._busy, self._busy_s, self._batches, self._requests, self._most = False, 0.0, 0, 0, 0
        self._steps = array("d")
        self._joining: list[float] = []
        self._progress: list[float] = []

    def run(self) -> Figures:
        """Simulate until every client has done its steps."""
        for client in self._clients:
            self._at(client.arrives, client, self._come)
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        assert len(self._progress) == len(self._clients), "every client ends"
        return Figures(
            steps=np.array(self._steps).reshape(-1, len(Part)),
            seconds=self._now - self._clients[0].arrives,
            busy_s=self._busy_s,
            joining_s=np.array(self._joining),
            progress=np.array(self._progress),
            most_reserved=self._most,
            together=self._requests / self._batches,
        )

    def _at(self, time: float, client: Client, then: Callable[[Client], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), lambda: then(client)))

    # -- sessions

    def _come(self, client: Client) -> None:
        if self._copies:
            self._bring(client, self._profile_s(client), None, self._joined)
        else:
            self._outside.append(client)
            self._let_in()

    def _let_in(self) -> None:
        room = self.options.capacity - self._largest
        while self._outside and self._standing + self._outside[0].memory.standing <= room:
            client = self._outside.popleft()
            self._standing += client.memory.standing

            def joined(key: int, client: Client = client) -> None:
                client.lasting = key
                self._joined(client)

            job = _Job(client, self._profile_s(client), 0.0, joined, keeps=client.memory.lasting, part=None)
            self._submit(job, client.memory.joining)

    def _profile_s(self, client: Client) -> float:
        """Seconds in which a new session's memory is measured: by three forward passes, and one with its backward."""
        costs = self.costs
        calls, rows = (
            3 * costs.forward_call_s + costs.backward_call_s,
            3 * costs.forward_row_s + costs.backward_row_s,
        )
        return calls + rows * client.rows

    def _joined(self, client: Client) -> None:
        self._joining.append(self._now - client.arrives)
        self._begin_step(client)

    def _leave(self, client: Client) -> None:
        self._idle.pop(client.name, None)
        for key in (client.held, client.lasting):
            if key:
                self._scheduler.release(key, self._now)
        if not self._copies:
            self._standing -= client.memory.standing
            self._let_in()
        self._admit()

    # -- a step, from its client's first layers to its client's first layers

    def _begin_step(self, client: Client) -> None:
        client.began, client.spent = self._now, [0.0] * len(Part)
        self._send(client, self._forward)

    def _send(self, client: Client, arrive: Callable[[Client], None]) -> None:
        """The client computes and sends a request, and may lose its connection before."""
        away = 0.0
        if self.fleet.drops and self._random.random() < self.fleet.drops:
            away = self._random.exponential(self.fleet.away_s)
        client.spent[Part.CLIENT] += client.compute_s
        client.spent[Part.AWAY] += away
        self._travel(client, client.compute_s + away, arrive)

    def _travel(self, client: Client, before_s: float, arrive: Callable[[Client], None]) -> None:
        client.spent[Part.COMMUNICATION] += client.transfer_s
        self._at(self._now + before_s + client.transfer_s, client, arrive)

    def _forward(self, client: Client) -> None:
        self._idle.pop(client.name, None)
        if self._copies and not client.held:
            self._bring(client, self._swap_s(client), Part.SCHEDULING, self._compute_forward)
        else:
            self._compute_forward(client)

    def _compute_forward(self, client: Client) -> None:
        plan = client.plan = self._plan(client)

        def answer(key: int) -> None:
            client.held = key if plan.kept else client.held
            client.replied = self._now
            self._travel(client, 0.0, lambda client: self._send(client, self._backward))

        costs, joins = self.costs, None if plan.graph else "forward"
        rows_s = costs.forward_row_s * client.rows
        self._submit(_Job(client, costs.forward_call_s, rows_s, answer, joins, plan.kept), plan.size)

    def _plan(self, client: Client) -> ForwardPlan:
        now = Circumstances(
            free=self._scheduler.free,
            waits=bool(self._waiting),
            largest=self._largest,
            answer_s=client.answer_s,
            reforward_s=self.costs.forward_call_s + self.costs.forward_row_s * client.rows,
        )
        return plan_forward(self.options.policy, client.memory, client.rows, now)

    def _backward(self, client: Client) -> None:
        client.answer_s = self._now - client.replied
        assert client.plan is not None
        again = client.plan.keeps == "input"
        call_s, rows_s = self._backward_s(client, again)
        job = _Job(client, call_s, rows_s, lambda key: self._computed(client), "backward" if again else None)
        self._submit(job, client.plan.backward)

    def _backward_s(self, client: Client, again: bool) -> tuple[float, float]:
        costs = self.costs
        if again:
            return costs.backward_call_s, costs.backward_row_s * client.rows
        return costs.kept_call_s, costs.kept_row_s * client.rows

    def _computed(self, client: Client) -> None:
        """The backward pass is done."""
        if self._copies and self._waiting:
            self._move_out(client, Part.SCHEDULING, lambda: self._travel(client, 0.0, self._step_again))
            return
        if self._copies:
            self._idle[client.name] = client
        elif client.held:
            self._scheduler.release(client.held, self._now)
            client.held = 0
        self._travel(client, 0.0, self._step_again)

    def _step_again(self, client: Client) -> None:
        client.spent[Part.CLIENT] += client.compute_s
        self._at(self._now + client.compute_s, client, self._end_step)

    def _end_step(self, client: Client) -> None:
        seconds = self._now - client.began
        assert math.isclose(sum(client.spent), seconds, rel_tol=1e-6, abs_tol=1e-6), "a part is not counted"
        self._steps.extend(client.spent)
        client.connected_s += seconds - client.spent[Part.AWAY]
        client.steps_left -= 1
        if client.steps_left:
            self._begin_step(client)
        else:
            self._progress.append(self.fleet.steps * self._alone_s(client) / client.connected_s)
            self._leave(client)

    def _alone_s(self, client: Client) -> float:
        """Seconds of a step of a client that has the server for itself."""
        costs, again = self.costs, self.options.policy in ("on-demand", "reforward-with-gradients")
        server = (
            costs.forward_call_s + costs.forward_row_s * client.rows + sum(self._backward_s(client, again))
        )
        return 4 * client.transfer_s + 3 * client.compute_s + server

    # -- vanilla: whole tasks

    def _whole(self, client: Client) -> int:
        return int(self.costs.weights_bytes) + client.memory.joining

    def _swap_s(self, client: Client) -> float:
        return (self.costs.weights_bytes + client.memory.lasting) / self.options.swap_rate

    def _bring(
        self, client: Client, seconds: float, part: Part | None, then: Callable[[Client], None]
    ) -> None:
        """Have a client's task in memory, in place of tasks that are between two steps."""
        size = self._whole(client)
        missing = size - self._scheduler.free - self._leaving
        while missing > 0 and self._idle:
            other = self._idle.pop(next(iter(self._idle)))
            missing -= self._whole(other)
            self._move_out(other, None, lambda: None)

        def brought(key: int) -> None:
            client.held = key
            then(client)

        self._submit(_Job(client, seconds, 0.0, brought, keeps=size, part=part), size)

    def _move_out(self, client: Client, part: Part | None, then: Callable[[], None]) -> None:
        held, client.held = client.held, 0
        self._leaving += self._whole(client)

        def gone(key: int) -> None:
            self._leaving -= self._whole(client)
            self._scheduler.release(held, self._now)
            then()

        self._submit(_Job(client, self._swap_s(client), 0.0, gone, part=part), 0)

    # -- the server

    def _submit(self, job: _Job, size: int) -> None:
        job.since = self._now
        if size:
            job.key, client = next(self._keys), job.client
            expected_s = job.call_s + job.rows_s
            demand = Demand(job.key, client.name, size, client.rows, job.joins, expected_s, job.keeps)
            self._scheduler.submit(demand, self._now)
            self._waiting[job.key] = job
        else:  # it has its memory
            self._ready[job.joins].append((next(self._order), job))
        self._admit()

    def _admit(self) -> None:
        for demand in self._scheduler.grant(self._now):
            job = self._waiting.pop(demand.key)
            self._ready[job.joins].append((next(self._order), job))
        self._most = max(self._most, self._scheduler.reserved)
        later = self._scheduler.next_event(self._now)
        if later is not None and later < self._wakes:
            self._wakes = later
            heapq.heappush(self._events, (later, next(self._order), self._wake))
        self._compute()

    def _wake(self) -> None:
        self._wakes = math.inf
        self._admit()

    def _compute(self) -> None:
        """Compute what was admitted first, and those of its kind behind it, unless something is being computed."""
        queues = [queue for queue in self._ready.values() if queue]
        if self._busy or not queues:
            return
        queue = min(queues, key=lambda queue: queue[0][0])
        batch = [queue.popleft()[1]]
        rows = batch[0].client.rows
        while batch[0].joins and queue and rows + queue[0][1].client.rows <= self.options.most_together:
            batch.append(queue.popleft()[1])
            rows += batch[-1].client.rows
        seconds = max(job.call_s for job in batch) + sum(job.rows_s for job in batch)
        for job in batch:
            if job.part is not None:
                job.client.spent[Part.SCHEDULING] += self._now - job.since
                job.client.spent[job.part] += seconds
        if batch[0].part == Part.COMPUTATION:
            self._batches, self._requests = self._batches + 1, self._requests + len(batch)
        self._busy, self._busy_s = True, self._busy_s + seconds
        heapq.heappush(self._events, (self._now + seconds, next(self._order), lambda: self._finish(batch)))

    def _finish(self, batch: list[_Job]) -> None:
        self._busy = False
        for job in batch:
            if job.keeps:
                self._scheduler.shrink(job.key, job.keeps)
            elif job.key:
                self._scheduler.release(job.key, self._now)
        for job in batch:
            job.then(job.key)
        self._admit()
