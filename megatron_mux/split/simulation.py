"""Simulates a split server with thousands of clients, by measured costs and the server's own scheduler and policies.

What is simulated is time and memory: sessions arrive, send requests over links of their own, wait, are computed on one
thread, drop out and come back. Nothing is computed for real.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from megatron_mux.split.policies import Circumstances, ForwardPlan, PolicyName, plan_forward
from megatron_mux.split.scheduler import Demand, Scheduler, SchedulerOptions
from megatron_mux.split.session_memory import Memory


@dataclass(frozen=True)
class Costs:
    """What a server's requests cost, as measured.

    Attributes:
        forward_call_s, forward_row_s: Seconds of a forward pass, and of each of its rows.
        backward_call_s, backward_row_s: Of a backward pass that computes its forward pass again.
        kept_call_s, kept_row_s: Of a backward pass whose graph was kept.
        forward_row_bytes, backward_row_bytes, graph_row_bytes: Bytes of a row, see `Memory`.
        hidden_row_bytes: Of its hidden states, in memory and on the wire.
        lasting_bytes: Of a session's adapter and optimizer.
        weights_bytes: Of the body.
    """

    forward_call_s: float
    forward_row_s: float
    backward_call_s: float
    backward_row_s: float
    kept_call_s: float
    kept_row_s: float
    forward_row_bytes: float
    backward_row_bytes: float
    graph_row_bytes: float
    hidden_row_bytes: float
    lasting_bytes: float
    weights_bytes: float


@dataclass(frozen=True)
class Fleet:
    """The clients.

    Attributes:
        clients: How many come.
        arrivals_s: Mean seconds between two arrivals; 0: all at once.
        steps: Optimizer steps of each.
        rows: Least and most rows of a request, the same in all steps of a client.
        bandwidth: Median bytes a second of a client's link, each way; log-normal with `spread`.
        spread: Standard deviation of the bandwidth's logarithm.
        latency_s: One way.
        client_row_s: Seconds of a row on the client in each of its three parts of a step.
        drops: Probability that a client drops out before a request.
        away_s: Mean seconds until it is back.
        seed: Of all random numbers.
    """

    clients: int
    arrivals_s: float = 0.0
    steps: int = 10
    rows: tuple[int, int] = (64, 512)
    bandwidth: float = 10e6
    spread: float = 0.8
    latency_s: float = 0.02
    client_row_s: float = 1e-4
    drops: float = 0.0
    away_s: float = 30.0
    seed: int = 0


@dataclass(frozen=True)
class ServerOptions:
    """The server.

    Attributes:
        capacity: Bytes for adapters and requests; of `vanilla` also for copies of the body.
        policy: What is kept between a forward pass and its backward.
        scheduler: How requests are ordered.
        most_together: Most rows that are computed as one micro-batch; 0: each by itself.
        swap_rate: Bytes a second at which `vanilla` moves tasks.
    """

    capacity: int
    policy: PolicyName = "on-demand"
    scheduler: SchedulerOptions = SchedulerOptions()  # noqa: RUF009 (frozen)
    most_together: int = 0
    swap_rate: float = 8e9


@dataclass(frozen=True)
class Figures:
    """What a simulation found.

    Attributes:
        steps: Optimizer steps that were done.
        seconds: From the first arrival to the last end.
        communication_s, computation_s, client_s: Mean of a step.
        waiting_s: `[requests]` seconds that each request waited for memory and its turn.
        step_s: `[clients]` mean seconds of a client's steps.
        most_reserved: Bytes at once.
        together: Mean number of requests in a micro-batch.
    """

    steps: int
    seconds: float
    communication_s: float
    computation_s: float
    client_s: float
    waiting_s: np.ndarray
    step_s: np.ndarray
    most_reserved: int
    together: float

    @property
    def jain(self) -> float:
        """Jain's index of fairness over clients' steps per second."""
        rates = 1.0 / self.step_s
        return float(rates.sum() ** 2 / (len(rates) * (rates**2).sum()))


@dataclass(eq=False)
class _Client:
    name: str
    rows: int
    transfer_s: float
    compute_s: float
    steps_left: int
    memory: Memory
    began: float = 0.0
    lasting: int = 0
    held: int = 0
    plan: ForwardPlan | None = None
    answer_s: float = 0.0
    sent: float = 0.0


@dataclass(eq=False)
class _Request:
    client: _Client
    backward: bool
    arrived: float
    key: int = 0
    keeps: int = 0
    seconds: float = 0.0
    joins: bool = True


@dataclass(eq=False)
class Simulation:
    """One run.

    Args:
        costs: Of the server's requests.
        fleet: The clients.
        options: The server.
    """

    costs: Costs
    fleet: Fleet
    options: ServerOptions
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list, init=False)
    _ready: deque[_Request] = field(default_factory=deque, init=False)
    _waiting: dict[int, _Request] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.fleet.seed)
        self._scheduler = Scheduler(self.options.capacity, self.options.scheduler)
        self._order, self._keys = count(), count(1)
        self._now, self._busy, self._most, self._wakes = 0.0, False, 0, math.inf
        self._idle: dict[str, _Client] = {}  # of vanilla: in memory, between two steps
        self._waits: list[float] = []
        self._sums = {"communication": 0.0, "computation": 0.0, "client": 0.0}
        self._done: list[float] = []
        self._batches = self._requests = self._steps = 0

    def run(self) -> Figures:
        """Simulate until every client has done its steps."""
        fleet, at = self.fleet, 0.0
        for number in range(fleet.clients):
            at += self._random.exponential(fleet.arrivals_s) if fleet.arrivals_s else 0.0
            client = self._client(number)
            self._at(at, lambda client=client: self._join(client))  # type: ignore[misc]
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        each = max(1, self._steps)
        return Figures(
            self._steps,
            self._now,
            self._sums["communication"] / each,
            self._sums["computation"] / each,
            self._sums["client"] / each,
            np.array(self._waits),
            np.array(self._done),
            self._most,
            self._requests / max(1, self._batches),
        )

    def _client(self, number: int) -> _Client:
        fleet, costs = self.fleet, self.costs
        rows = int(self._random.integers(fleet.rows[0], fleet.rows[1] + 1))
        bandwidth = fleet.bandwidth * math.exp(self._random.normal(0.0, fleet.spread))
        memory = Memory(
            rows,
            int(costs.forward_row_bytes * rows),
            int(costs.graph_row_bytes * rows),
            int(costs.backward_row_bytes * rows),
            int(costs.hidden_row_bytes * rows),
            int(costs.lasting_bytes),
        )
        transfer = fleet.latency_s + costs.hidden_row_bytes * rows / bandwidth
        return _Client(f"client {number}", rows, transfer, fleet.client_row_s * rows, fleet.steps, memory)

    # -- a client

    def _join(self, client: _Client) -> None:
        """Reserve what lasts; `vanilla` has whole tasks, which come to memory with their first request."""
        client.began = self._now
        if self.options.policy == "vanilla":
            self._send(client, backward=False)
            return
        key = next(self._keys)
        self._submit(
            _Request(client, False, self._now, key, client.memory.lasting, 0.0, False), client.memory.lasting
        )

    def _send(self, client: _Client, backward: bool) -> None:
        """The client computes, and sends a request, unless it drops out before."""
        away = 0.0
        if self.fleet.drops and self._random.random() < self.fleet.drops:
            away = self._random.exponential(self.fleet.away_s)
        self._sums["client"] += client.compute_s
        self._sums["communication"] += client.transfer_s
        self._at(
            self._now + client.compute_s + away + client.transfer_s, lambda: self._arrive(client, backward)
        )

    def _arrive(self, client: _Client, backward: bool) -> None:
        costs, rows = self.costs, client.rows
        request = _Request(client, backward, self._now, next(self._keys))
        if backward:
            assert client.plan is not None
            kept = client.plan.keeps != "input"
            call, row = (
                (costs.kept_call_s, costs.kept_row_s)
                if kept
                else (costs.backward_call_s, costs.backward_row_s)
            )
            request.joins = not kept
            size = client.plan.backward
            client.answer_s = self._now - client.sent
        else:
            client.plan = self._plan(client)
            call, row = costs.forward_call_s, costs.forward_row_s
            request.joins = not client.plan.graph
            size, request.keeps = client.plan.size, client.plan.kept
            if self.options.policy == "vanilla":
                self._idle.pop(client.name, None)
                if not client.held:
                    size = request.keeps = int(costs.weights_bytes) + client.memory.joining
                    request.seconds = self._swap_seconds(client) + self._move_out(size)
        request.seconds += call + row * rows
        self._submit(request, size)

    def _plan(self, client: _Client) -> ForwardPlan:
        costs = self.costs
        now = Circumstances(
            self._scheduler.free,
            bool(self._waiting),
            int(costs.backward_row_bytes * self.fleet.rows[1]),
            client.answer_s,
            costs.forward_call_s + costs.forward_row_s * client.rows,
        )
        return plan_forward(self.options.policy, client.memory, client.rows, now)

    def _move_out(self, size: int) -> float:
        """Free the memory of tasks between two steps, until a task fits; returns the seconds that it takes."""
        seconds = 0.0
        while self._scheduler.free < size and self._idle:
            other = self._idle.pop(next(iter(self._idle)))
            seconds += self._swap_seconds(other)
            self._release(other)
        return seconds

    def _release(self, client: _Client) -> None:
        self._scheduler.release(client.held, self._now)
        client.held = 0

    def _swap_seconds(self, client: _Client) -> float:
        return (self.costs.weights_bytes + client.memory.lasting) / self.options.swap_rate

    # -- the server

    def _submit(self, request: _Request, size: int) -> None:
        if not size:
            self._ready.append(request)
        else:
            client = request.client
            demand = Demand(request.key, client.name, size, client.rows, None, request.seconds)
            self._scheduler.submit(demand, self._now)
            self._waiting[request.key] = request
        self._admit()

    def _admit(self) -> None:
        for demand in self._scheduler.grant(self._now):
            self._ready.append(self._waiting.pop(demand.key))
        self._most = max(self._most, self._scheduler.capacity - self._scheduler.free)
        later = self._scheduler.next_event(self._now)
        if later is not None and not self._now < self._wakes <= later:
            self._wakes = later
            self._at(later, self._admit)
        self._compute()

    def _compute(self) -> None:
        if self._busy or not self._ready:
            return
        first = self._ready.popleft()
        batch, rows = [first], first.client.rows
        if first.joins and self.options.most_together:
            for other in list(self._ready):
                if other.joins and other.backward == first.backward:
                    if rows + other.client.rows > self.options.most_together:
                        break
                    batch.append(other)
                    rows += other.client.rows
            for other in batch[1:]:
                self._ready.remove(other)
        seconds = max(one.seconds - self._rows_seconds(one) for one in batch) + sum(
            map(self._rows_seconds, batch)
        )
        self._busy = True
        if first.seconds:
            self._waits += [self._now - one.arrived for one in batch]
            self._batches, self._requests = self._batches + 1, self._requests + len(batch)
            self._sums["computation"] += seconds
        self._at(self._now + seconds, lambda: self._finish(batch))

    def _rows_seconds(self, request: _Request) -> float:
        """Seconds of a request that grow with its rows: those of the call are paid once for a micro-batch."""
        if not request.seconds:
            return 0.0
        costs, rows = self.costs, request.client.rows
        if not request.backward:
            return costs.forward_row_s * rows
        return (costs.backward_row_s if request.joins else costs.kept_row_s) * rows

    def _finish(self, batch: list[_Request]) -> None:
        self._busy = False
        for request in batch:
            client = request.client
            if self._scheduler.has_reserved(request.key):
                if request.keeps:
                    self._scheduler.shrink(request.key, request.keeps)
                else:
                    self._scheduler.release(request.key, self._now)
            if not request.seconds:  # it has joined
                client.lasting = request.key
                self._send(client, backward=False)
            elif request.backward:
                self._end_step(client)
            else:
                client.held = request.key if request.keeps else client.held
                client.sent = self._now
                self._reply(client, lambda client=client: self._send(client, True))  # type: ignore[misc]
        self._admit()

    def _reply(self, client: _Client, then: Callable[[], None]) -> None:
        self._sums["communication"] += client.transfer_s
        self._at(self._now + client.transfer_s, then)

    def _end_step(self, client: _Client) -> None:
        client.steps_left -= 1
        self._steps += 1
        stays = self.options.policy == "vanilla" and not self._waiting and client.steps_left > 0
        if client.held and not stays:
            self._release(client)
        elif stays:
            self._idle[client.name] = client
        if client.steps_left:
            self._reply(client, lambda: self._next_step(client))
        else:
            self._reply(client, lambda: self._leave(client))

    def _next_step(self, client: _Client) -> None:
        self._sums["client"] += client.compute_s
        self._at(self._now + client.compute_s, lambda: self._send(client, backward=False))

    def _leave(self, client: _Client) -> None:
        self._done.append((self._now - client.began) / self.fleet.steps)
        if client.lasting:
            self._scheduler.release(client.lasting, self._now)
            self._admit()

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))
