"""Measuring the links between the processes of a run, alone and together, over the communicator that it uses.

What is timed is the operation that rows and gradients travel by, an all-to-all in which only some processes send.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_mux.moe.entries import Floats
from megatron_mux.runtime import Parallel

_FIRST_BYTES, _MOST_BYTES = 1 << 15, 1 << 28
_SMALL = 8
"""A transfer is compared with one of an eighth of its bytes: what both take alike is latency."""
_REPEATS, _MOST_REPEATS = 3, 16
_SAME = 0.05
"""Two transfers took the same if they differ by this share of what the larger one takes."""
_TIMES = 2 * _REPEATS + 3
"""Times a transfer's duration that measuring a link takes, or somewhat less: longer ones are found by doubling. More
where latency is most of a transfer.
"""
_PATIENCE = 16
"""Times the duration that was asked for at which a transfer is not made longer any more."""


@dataclass(frozen=True)
class Transfer:
    """Time of transfers over some links at once.

    Attributes:
        bandwidth: Bytes per second of all of them together.
        latency: Seconds that a transfer without bytes would take.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class MeasuredLinks:
    """Links between P processes on some nodes.

    Attributes:
        bandwidth: [P][P] bytes per second from process to process, each pair alone; 0 on the diagonal.
        latency: [P][P] seconds.
        up, down: By node, bytes per second that leave and enter it if all its processes send and receive at once.
    """

    bandwidth: Floats
    latency: Floats
    up: dict[str, float]
    down: dict[str, float]


class LinkMeter:
    """Times transfers. All processes make the same calls.

    Args:
        seconds: That a transfer should take at least.
    """

    def __init__(self, parallel: Parallel, seconds: float) -> None:
        self._parallel, self._seconds = parallel, seconds
        self._first_bytes = _FIRST_BYTES

    def measure(self, links: Sequence[tuple[int, int]]) -> Transfer:
        """Time equally large transfers over some links at once.

        Args:
            links: Sender and receiver of each.
        """
        size = self._first_bytes
        self._time(links, size)  # which connects
        while self._time(links, size) < self._seconds and size < _MOST_BYTES:
            size *= 2
        long, short = self._least(links, size)
        # Latency and noise may hide what the bytes take.
        while long < 2 * short and size < _MOST_BYTES and long < _PATIENCE * self._seconds:
            size *= 2
            long, short = self._least(links, size)
        small = size // _SMALL
        per_byte = long / size if long < 2 * short else (long - short) / (size - small)
        return Transfer(len(links) / per_byte, max(0.0, short - small * per_byte))

    def _least(self, links: Sequence[tuple[int, int]], size: int) -> tuple[float, float]:
        """Seconds of transfers of `size` bytes, and of an eighth of them, taken in turns.

        The least of several: pauses of the machine and packets that are sent again only add to what a link takes.
        Transfers go on until the two least of each size took the same, or there are many.
        """
        long: list[float] = []
        short: list[float] = []
        for number in range(1, _MOST_REPEATS + 1):
            long.append(self._time(links, size))
            short.append(self._time(links, size // _SMALL))
            near = _SAME * min(long)
            if number >= _REPEATS and all(sorted(times)[1] - min(times) < near for times in (long, short)):
                break
        return min(long), min(short)

    def _time(self, links: Sequence[tuple[int, int]], size: int) -> float:
        """Seconds of the slowest process if `size` bytes cross each link."""
        rank, count = self._parallel.rank, self._parallel.world_size
        out = [size * links.count((rank, other)) for other in range(count)]
        into = [size * links.count((other, rank)) for other in range(count)]
        sent = torch.zeros(sum(out), dtype=torch.uint8, device=self._parallel.device)
        received = torch.empty(sum(into), dtype=torch.uint8, device=self._parallel.device)
        self._wait()
        start = time.perf_counter()
        dist.all_to_all_single(received, sent, into, out)
        self._wait()
        (slowest,) = self._parallel.most([time.perf_counter() - start])
        return slowest

    def _wait(self) -> None:
        """Wait for this device and for the other processes."""
        if self._parallel.device.type == "cuda":
            torch.cuda.synchronize(self._parallel.device)
        self._parallel.most([0.0])


def transfer_seconds(nodes: Sequence[str], seconds: float) -> float:
    """How long a transfer may take, so that measuring between nodes (not all pairs) takes so many seconds.

    Args:
        nodes: [P] node of each process.
    """
    count = len(set(nodes))
    alone = len({(nodes[i], nodes[j]) for i in range(len(nodes)) for j in range(len(nodes)) if i != j})
    return seconds / (_TIMES * (alone + 2 * count * (count > 1)))


def measure_links(
    meter: LinkMeter,
    nodes: Sequence[str],
    all_pairs: bool = True,
    done: Callable[[int, int], None] = lambda number, of: None,
) -> MeasuredLinks:
    """Measure all links.

    Args:
        nodes: [P] node of each process.
        all_pairs: Measure each pair of processes; otherwise one pair within each node and one between any two nodes,
            which stands for the others.
        done: Called with how many of the measurements are made.
    """
    pairs = [(i, j) for i in range(len(nodes)) for j in range(len(nodes)) if i != j]
    measured = (
        pairs if all_pairs else list({(nodes[i], nodes[j]): (i, j) for i, j in reversed(pairs)}.values())
    )
    names = list(dict.fromkeys(nodes)) if len(set(nodes)) > 1 else []
    total, count = len(measured) + 2 * len(names), 0
    transfers: dict[tuple[int, int], Transfer] = {}
    for pair in measured:
        transfers[pair] = meter.measure([pair])
        done(count := count + 1, total)
    by_nodes = {(nodes[i], nodes[j]): transfer for (i, j), transfer in transfers.items()}
    bandwidth, latency = np.zeros((2, len(nodes), len(nodes)))
    for i, j in pairs:
        transfer = transfers.get((i, j)) or by_nodes[nodes[i], nodes[j]]
        bandwidth[i, j], latency[i, j] = transfer.bandwidth, transfer.latency
    up, down = {}, {}
    for node in names:
        leaving = [(i, j) for i, j in pairs if nodes[i] == node != nodes[j]]
        up[node] = meter.measure(leaving).bandwidth
        done(count := count + 1, total)
        down[node] = meter.measure([(j, i) for i, j in leaving]).bandwidth
        done(count := count + 1, total)
    return MeasuredLinks(bandwidth, latency, up, down)
