"""Clients of a simulated split server, what their requests cost, and what a simulation finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from megatron_mux.split.server.policies import ForwardPlan, PolicyName
from megatron_mux.split.server.scheduler import SchedulerOptions
from megatron_mux.split.server.session_memory import Memory


class Part(IntEnum):
    """What the seconds of an optimizer step go to: the paper's three, the client's layers, and being disconnected."""

    COMMUNICATION = 0
    COMPUTATION = 1
    SCHEDULING = 2
    CLIENT = 3
    AWAY = 4


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

    def memory(self, rows: int) -> Memory:
        """Memory of a session whose requests have so many rows."""
        return Memory(
            rows,
            int(self.forward_row_bytes * rows),
            int(self.graph_row_bytes * rows),
            int(self.backward_row_bytes * rows),
            int(self.hidden_row_bytes * rows),
            int(self.lasting_bytes),
        )


@dataclass(frozen=True)
class Fleet:
    """The clients.

    Attributes:
        clients: How many come.
        arrivals_s: Mean seconds between two of them, of a Poisson process; 0: all at once.
        steps: Optimizer steps of each.
        rows: Fewest and most rows of a request, the same in all steps of a client.
        bandwidth: Median bytes a second of a client's link, each way.
        latency_s: Median seconds of a message without its bytes.
        client_row_s: Median seconds of a row on the client, in each of its three parts of a step.
        spread: Standard deviation of the logarithms of these three, which are log-normal and independent.
        drops: Probability that a client loses its connection before a request.
        away_s: Mean seconds until it is back.
        seed: Of all random numbers.
    """

    clients: int
    arrivals_s: float = 0.0
    steps: int = 10
    rows: tuple[int, int] = (64, 512)
    bandwidth: float = 10e6
    latency_s: float = 0.02
    client_row_s: float = 1e-4
    spread: float = 0.8
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
        most_together: Most rows that are computed as one micro-batch; 0: each request by itself.
        swap_rate: Bytes a second at which `vanilla` moves tasks.
    """

    capacity: int
    policy: PolicyName = "on-demand"
    scheduler: SchedulerOptions = SchedulerOptions()  # noqa: RUF009 (frozen)
    most_together: int = 0
    swap_rate: float = 8e9


@dataclass(eq=False)
class Client:
    """A client and its session.

    Attributes:
        name: Names both.
        arrives: When it comes, in seconds.
        rows: Of its requests.
        transfer_s: Seconds of a message with hidden states, either way.
        compute_s: Seconds of each of its three parts of a step.
        memory: Of its session.
        steps_left: Optimizer steps to go.
        began: When its step began.
        spent: Seconds of that step by `Part`.
        connected_s: Seconds of all its steps, without those that it was away.
        plan: Of its last forward pass.
        lasting, held: Reservations of what lasts, and of what is kept for a backward pass (of `vanilla`, of the whole
            task); 0: none.
        replied: When its last forward pass was answered.
        answer_s: How long it then took to send gradients.
    """

    name: str
    arrives: float
    rows: int
    transfer_s: float
    compute_s: float
    memory: Memory
    steps_left: int
    began: float = 0.0
    spent: list[float] = field(default_factory=list)
    connected_s: float = 0.0
    plan: ForwardPlan | None = None
    lasting: int = 0
    held: int = 0
    replied: float = 0.0
    answer_s: float = 0.0


def make_clients(fleet: Fleet, costs: Costs, random: np.random.Generator) -> list[Client]:
    """Draw the clients of a fleet."""
    count = fleet.clients
    arrivals = np.cumsum(random.exponential(fleet.arrivals_s, count))
    rows = random.integers(fleet.rows[0], fleet.rows[1] + 1, count)
    bandwidth, latency, row_s = (
        median * np.exp(random.normal(0.0, fleet.spread, count))
        for median in (fleet.bandwidth, fleet.latency_s, fleet.client_row_s)
    )
    transfers = latency + costs.hidden_row_bytes * rows / bandwidth
    return [
        Client(
            f"client {i}",
            float(arrivals[i]),
            int(rows[i]),
            float(transfers[i]),
            float(row_s[i] * rows[i]),
            costs.memory(int(rows[i])),
            fleet.steps,
        )
        for i in range(count)
    ]


@dataclass(frozen=True)
class Figures:
    """What a simulation found.

    Attributes:
        steps: `[steps, 5]` seconds of each optimizer step by `Part`; of a micro-batch, each of its requests counts all.
        seconds: From the first arrival to the last end.
        busy_s: Seconds that the compute thread was busy.
        joining_s: `[clients]` seconds from a client's arrival until it was let in.
        progress: `[clients]` steps per second while connected, in those of a client alone on the server.
        most_reserved: Bytes at once.
        together: Mean number of requests in a micro-batch.
    """

    steps: np.ndarray
    seconds: float
    busy_s: float
    joining_s: np.ndarray
    progress: np.ndarray
    most_reserved: int
    together: float

    @property
    def steps_per_s(self) -> float:
        """Throughput of all clients."""
        return len(self.steps) / self.seconds

    @property
    def jain(self) -> float:
        """Jain's index of fairness over the clients' progress: 1 if the server slows all down alike."""
        return float(self.progress.sum() ** 2 / (len(self.progress) * (self.progress**2).sum()))
