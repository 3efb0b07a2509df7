"""The topology file: workers that hold experts, their nodes, and the links between them.

    {"workers": [{"node": "a", "capacity": 43}, {"node": "a", "capacity": 43}, {"node": "b", "capacity": 43}],
     "master_node": "a",
     "bandwidth": {"within_node": 18.3e9, "between_nodes": 1.17e9},
     "uplinks": {"a": {"up": 1.17e9, "down": 1.17e9}, "b": {"up": 1.17e9, "down": 1.17e9}}}

Bandwidths are bytes per second; a capacity is a number of experts over all layers (the paper's C_n), or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from megatron_mux.errors import UserError
from megatron_mux.moe.entries import Floats, Ints, index, read_model, to_array

_Bandwidth = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class Worker(BaseModel):
    """A process that holds experts: an expert manager, or a rank of an expert-parallel group."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    node: str = Field(min_length=1)
    """The machine that it runs on."""
    capacity: int = Field(ge=0)
    """Experts that it can hold over all layers, or bytes for them: see `Topology.capacity_unit`."""
    seconds_per_row: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds that one row takes in one expert, forward and backward."""


class Uplink(BaseModel):
    """The link of a node to all other nodes, which its workers share."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    up: _Bandwidth
    """Bytes per second that leave the node."""
    down: _Bandwidth
    """Bytes per second that enter the node."""


class BandwidthClasses(BaseModel):
    """Bandwidths of a topology with two kinds of links."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    within_node: _Bandwidth
    """Bytes per second between two processes of a node."""
    between_nodes: _Bandwidth
    """Bytes per second between two processes of different nodes."""


def _bandwidth(value: Any) -> BandwidthClasses | Floats:
    if isinstance(value, (dict, BandwidthClasses)):
        return BandwidthClasses.model_validate(value)
    return to_array(value, "bandwidth", (None, None), ("worker", "worker"))


def _master_bandwidth(value: Any) -> Floats | None:
    return None if value is None else to_array(value, "master_bandwidth", (None,), ("worker",))


def _latency(value: Any) -> Floats | None:
    return None if value is None else to_array(value, "latency_s", (None, None), ("worker", "worker"))


_AsLists = PlainSerializer(lambda value: value.tolist() if isinstance(value, np.ndarray) else value)


class Topology(BaseModel):
    """Workers and links. N: workers."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    workers: tuple[Worker, ...] = Field(min_length=1)
    """[N]"""
    bandwidth: Annotated[Any, PlainValidator(_bandwidth), _AsLists]
    """`{"within_node", "between_nodes"}`, or [N][N] from worker to worker, each measured alone; the diagonal counts
    only where the master's bandwidth is derived from it."""
    master_node: str | None = None
    """The node of the master; None: there is no master, the workers themselves send tokens (expert parallelism)."""
    master_bandwidth: Annotated[Any, PlainValidator(_master_bandwidth), _AsLists] = None
    """[N] between master and worker (the paper's B_n); None: that of a worker on the master's node."""
    latency_s: Annotated[Any, PlainValidator(_latency), _AsLists] = None
    """[N][N] seconds from worker to worker before the first byte arrives, if they were measured; no objective counts
    them."""
    uplinks: Mapping[str, Uplink] = {}
    """By node; a node without an entry has no limit beyond those of single links."""
    capacity_unit: Literal["experts", "bytes"] = "experts"
    """Unit of the workers' capacities."""
    expert_bytes: int | None = Field(default=None, ge=1, strict=True)
    """Bytes of one expert with its adapters and optimizer state; needed if capacities are bytes."""

    @model_validator(mode="after")
    def _check(self) -> Topology:
        nodes = set(self.node_names)
        count = len(self.workers)
        for node in self.uplinks:
            if node not in nodes and node != self.master_node:
                raise ValueError(
                    f"uplinks.{node}: no worker is on this node: nodes are {', '.join(sorted(nodes))}"
                )
        if self.capacity_unit == "bytes" and self.expert_bytes is None:
            raise ValueError("expert_bytes: is missing: capacities in bytes need the bytes of one expert")
        if isinstance(self.bandwidth, np.ndarray):
            if self.bandwidth.shape != (count, count):
                rows, columns = self.bandwidth.shape
                raise ValueError(
                    f"bandwidth: is {rows} x {columns}, but must be {count} x {count}, from worker to worker"
                )
            for i, j in np.argwhere((self.bandwidth == 0) & ~np.eye(count, dtype=bool))[:1]:
                raise ValueError(f"bandwidth{index(i, j)}: must be greater than 0 bytes per second")
        if self.latency_s is not None and self.latency_s.shape != (count, count):
            raise ValueError(f"latency_s: must be {count} x {count}, from worker to worker")
        if self.master_bandwidth is not None:
            if self.master_node is None:
                raise ValueError("master_node: is missing: master_bandwidth needs it")
            if self.master_bandwidth.shape != (count,):
                raise ValueError(
                    f"master_bandwidth: has {len(self.master_bandwidth)} entries, but there are {count} workers"
                )
            for n in np.flatnonzero(self.master_bandwidth == 0)[:1]:
                raise ValueError(f"master_bandwidth[{n}]: must be greater than 0 bytes per second")
        elif self.master_node is not None and isinstance(self.bandwidth, np.ndarray):
            self._check_derived_master(nodes)
        return self

    def _check_derived_master(self, nodes: set[str]) -> None:
        if self.master_node not in nodes:
            raise ValueError(
                f"master_node: no worker is on node {self.master_node!r}, so that its bandwidths are not known: give "
                "master_bandwidth, or one of the nodes " + ", ".join(sorted(nodes))
            )
        local = [n for n, worker in enumerate(self.workers) if worker.node == self.master_node]
        if len(local) == 1 and self.bandwidth[local[0], local[0]] == 0:
            raise ValueError(
                f"bandwidth{index(local[0], local[0])}: must be the bandwidth between the master and this worker, "
                "the only one on its node; or give master_bandwidth"
            )

    @property
    def node_names(self) -> tuple[str, ...]:
        """Nodes of workers, in the order in which they first appear."""
        return tuple(dict.fromkeys(worker.node for worker in self.workers))

    @property
    def capacities(self) -> Ints:
        """[N] experts that each worker can hold over all layers."""
        size = self.expert_bytes if self.capacity_unit == "bytes" and self.expert_bytes else 1
        return np.array([worker.capacity // size for worker in self.workers], dtype=np.int64)

    @property
    def row_seconds(self) -> Floats:
        """[N] seconds that one row takes in one expert, forward and backward."""
        return np.array([worker.seconds_per_row for worker in self.workers])

    def between_workers(self) -> Floats:
        """[N][N] bytes per second from worker to worker; infinite from a worker to itself."""
        if isinstance(self.bandwidth, np.ndarray):
            bandwidth = self.bandwidth.copy()
        else:
            nodes = np.array([worker.node for worker in self.workers])
            same = nodes[:, None] == nodes[None, :]
            bandwidth = np.where(same, self.bandwidth.within_node, self.bandwidth.between_nodes)
        np.fill_diagonal(bandwidth, np.inf)
        return bandwidth

    def from_master(self) -> Floats:
        """[N] bytes per second between master and worker (the paper's B_n).

        Raises:
            UserError: There is no master.
        """
        if self.master_node is None:
            raise UserError("master_node: is missing: the paper's objective needs the node of the master")
        if self.master_bandwidth is not None:
            return np.array(self.master_bandwidth)
        on_node = np.array([worker.node == self.master_node for worker in self.workers])
        if not isinstance(self.bandwidth, np.ndarray):
            within, between = self.bandwidth.within_node, self.bandwidth.between_nodes
            return np.asarray(np.where(on_node, within, between), dtype=np.float64)
        seconds = np.empty(len(self.workers))
        for n in range(len(self.workers)):
            others = [int(m) for m in np.flatnonzero(on_node) if m != n] or [
                n
            ]  # links of the master's neighbours
            seconds[n] = min(self.bandwidth[m, n] for m in others)
        return seconds

    def check_capacity(self, layers: int, experts: int) -> None:
        """Check that the workers together can hold every expert.

        Raises:
            UserError: They cannot.
        """
        total = int(self.capacities.sum())
        if total < layers * experts:
            raise UserError(
                f"workers: have a capacity of {total} experts together, but the model has {layers} layers x {experts} "
                f"experts = {layers * experts}: raise workers[...].capacity, or add workers"
            )

    def of_first(self, count: int) -> Topology:
        """Return the same topology with its first workers only."""
        workers = self.workers[:count]
        nodes = {worker.node for worker in workers} | {self.master_node}
        first, square = slice(count), (slice(count), slice(count))
        return self.model_copy(
            update={
                "workers": workers,
                "bandwidth": self.bandwidth[square]
                if isinstance(self.bandwidth, np.ndarray)
                else self.bandwidth,
                # That of all workers: those that are left may not tell it.
                "master_bandwidth": None if self.master_node is None else self.from_master()[first],
                "latency_s": None if self.latency_s is None else self.latency_s[square],
                "uplinks": {node: link for node, link in self.uplinks.items() if node in nodes},
            }
        )

    def with_slots(self, slots: int) -> Topology:
        """Return the same topology with workers that hold `slots` experts each, over all layers."""
        return self.with_room([slots] * len(self.workers))

    def with_room(self, room: Sequence[int]) -> Topology:
        """Return the same topology with workers that hold so many experts, over all layers: `[N]`."""
        pairs = zip(self.workers, room, strict=True)
        workers = tuple(worker.model_copy(update={"capacity": count}) for worker, count in pairs)
        return self.model_copy(update={"workers": workers, "capacity_unit": "experts", "expert_bytes": None})


def read_topology(path: str | Path) -> Topology:
    """Read a topology.

    Raises:
        UserError: The file cannot be read, or an entry is wrong: names file and entry.
    """
    return read_model(path, Topology, "see docs/expert-placement.md")
