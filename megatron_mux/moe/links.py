"""What a layer's transfers take on the links of a topology.

A transfer is one of the four of a layer: tokens to the workers and results back, then gradients to the workers and
gradients back. Each takes as long as its slowest link: a pair of processes by itself, or the uplink or downlink that
all pairs of a node share.

A master's workers answer each as soon as it has its rows, so that answers travel while other rows are still on their
way. How much comes on top depends on how messages share a link. One after the other: the largest answer. Evenly: once
the m-th largest message has arrived, all smaller ones and m times its bytes have left, and no more than the m largest
answers are still to come, so m times the m-th largest comes on top, for the worst m; all answers if they are equally
large. TCP connections that begin at once get uneven shares, which nobody knows: the middle of both is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_mux.moe.entries import Floats
from megatron_mux.moe.topology import Topology


@dataclass(frozen=True)
class Traffic:
    """What a step sends.

    Attributes:
        tokens: Tokens of a step (the paper's K), of all senders together.
        row_bytes: Bytes of one token's features (the paper's b H / 8).
        routing_bytes: Bytes that travel with them, mean of the four transfers; the paper counts none.
    """

    tokens: int
    row_bytes: float
    routing_bytes: float = 0.0

    @property
    def step_bytes(self) -> float:
        """Bytes of all tokens of a step."""
        return self.tokens * self.row_bytes


def routing_bytes(top_k: int) -> float:
    """Bytes that the exchange sends beside a row's features, mean of its four transfers.

    Out go the weights and numbers of its experts and its task's slot, and the weights' gradients come back: see
    `backbone.experts.exchange`.
    """
    weights, numbers = 4 * top_k, 4 * (top_k + 1)
    return (2 * weights + numbers) / 4


def paper_seconds(topology: Topology, traffic: Traffic) -> Floats:
    """[N] seconds of a layer if every token selects one expert on the worker: 2 D / B_n (the paper's equation 5).

    Raises:
        UserError: The topology has no master.
    """
    return 2.0 * traffic.step_bytes / topology.from_master()


@dataclass(frozen=True)
class Links:
    """Links between senders and workers. S: senders, N: workers.

    Attributes:
        senders: [S] index of the worker that sends; None: the master.
        sender_nodes, worker_nodes: [S], [N] nodes.
        bytes_sent: [S] bytes of the tokens of each sender.
        outward: [S][N] bytes per second from sender to worker; infinite to itself.
        inward: [N][S] bytes per second from worker to sender.
        shared: By node, bytes per second that leave and enter it.
    """

    senders: tuple[int | None, ...]
    sender_nodes: tuple[str, ...]
    worker_nodes: tuple[str, ...]
    bytes_sent: Floats
    outward: Floats
    inward: Floats
    shared: dict[str, tuple[float, float]]

    @property
    def away(self) -> Floats:
        """[S][N] 1 where sender and worker are on different nodes."""
        return np.array([[float(s != n) for n in self.worker_nodes] for s in self.sender_nodes])

    def seconds(self, visits: Floats) -> float:
        """Seconds of the four transfers of a layer.

        Args:
            visits: [S][N] probability that a token of the sender is sent to the worker.
        """
        moved = visits * self.bytes_sent[:, None]
        outward = (moved / self.outward).max()
        inward = (moved / self.inward.T).max()
        crossing, both_ways = moved * self.away, 0.0
        for node, (up, down) in self.shared.items():
            at_sender, at_worker = self._on(self.sender_nodes, node), self._on(self.worker_nodes, node)
            left, entered = crossing[at_sender].sum(), crossing[:, at_worker].sum()
            outward = max(outward, left / up, entered / down)
            both_ways = max(both_ways, entered / up, left / down)
        if self.answers_overlap:
            inward = max(inward, answers_on_top(visits[0] * self.shared_seconds))
            return float(2.0 * (max(outward, both_ways) + inward))
        return float(2.0 * (outward + max(inward, both_ways)))

    @property
    def shared_seconds(self) -> Floats:
        """[N] seconds on the link of a master's node if all tokens visit the worker; 0 beside the master."""
        node = self.sender_nodes[0]
        if not self.answers_overlap or node not in self.shared:
            return np.zeros(len(self.worker_nodes))
        return np.asarray(self.away[0] * self.bytes_sent[0] / min(self.shared[node]))

    @property
    def answers_overlap(self) -> bool:
        """Whether answers travel while other rows are on their way: from a master's workers."""
        return None in self.senders

    def matrices(self) -> tuple[Floats, Floats]:
        """Seconds on each link for each worker that all tokens visit, if a token's worker depends on no sender.

        Returns:
            [links][N] of tokens or gradients to the workers, and of those back, which come after them. Either takes
            `(matrix @ visits).max()` seconds. The first has the shared links of answers, too, if those overlap.
        """
        outward = [np.diag((self.bytes_sent[:, None] / self.outward).max(axis=0))]
        inward = [np.diag((self.bytes_sent[:, None] / self.inward.T).max(axis=0))]
        crossing = self.away * self.bytes_sent[:, None]
        for node, (up, down) in self.shared.items():
            left = crossing[self._on(self.sender_nodes, node)].sum(axis=0)
            entered = crossing.sum(axis=0) * self._on(self.worker_nodes, node)
            outward.append(np.stack([left / up, entered / down]))
            (outward if self.answers_overlap else inward).append(np.stack([entered / up, left / down]))
        return tuple(_without_idle(np.concatenate(rows)) for rows in (outward, inward))  # type: ignore[return-value]

    @staticmethod
    def _on(nodes: Sequence[str], node: str) -> np.ndarray:
        return np.array([name == node for name in nodes])


def answers_on_top(seconds: Floats) -> Floats:
    """Seconds that answers over a shared link need beyond those of the rows: the middle of the least and the most.

    Args:
        seconds: [N, ...] that each answer takes alone.

    Returns:
        [...]
    """
    order = np.arange(len(seconds), 0, -1).reshape(-1, *[1] * (seconds.ndim - 1))
    smallest_first = np.sort(seconds, axis=0)
    return np.asarray(((smallest_first * order).max(axis=0) + smallest_first[-1]) / 2)


def _without_idle(matrix: Floats) -> Floats:
    """Drop links that nothing is sent over, but keep at least one."""
    used = matrix.any(axis=1)
    return matrix[used] if used.any() else matrix[:1]


def links_of(topology: Topology, traffic: Traffic) -> Links:
    """Return the links of a topology: from its master, or without one from every worker to every other one.

    Args:
        traffic: What a step sends; without a master, each worker has the same share of the tokens.
    """
    nodes = tuple(worker.node for worker in topology.workers)
    moved = traffic.tokens * (traffic.row_bytes + traffic.routing_bytes)
    shared = {node: (link.up, link.down) for node, link in topology.uplinks.items()}
    if topology.master_node is not None:
        to_workers = topology.from_master()[None, :]
        return Links(
            (None,),
            (topology.master_node,),
            nodes,
            np.array([moved]),
            to_workers,
            to_workers.T,
            shared,
        )
    between = topology.between_workers()
    sent = np.full(len(nodes), moved / len(nodes))
    return Links(tuple(range(len(nodes))), nodes, nodes, sent, between, between, shared)
