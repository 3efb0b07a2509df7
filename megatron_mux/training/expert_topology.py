"""The workers and links that a run's experts are placed by: from a file, or from the hosts of its ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from megatron_mux.arguments import MuxArguments
from megatron_mux.engine.agreement import everyones, from_first
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Experts
from megatron_mux.moe.entries import Floats
from megatron_mux.moe.measure_links import LinkMeter, MeasuredLinks, measure_links, transfer_seconds
from megatron_mux.moe.topology import BandwidthClasses, Topology, Uplink, Worker, read_topology
from megatron_mux.runtime import Parallel

WITHIN_NODE, BETWEEN_NODES = 50e9, 12.5e9
"""Bytes per second that are assumed where nothing is measured: of NVLink or PCIe 5, and of 100 Gbit/s Ethernet, which
the ranks of a node share. Moves are priced by them too, so that gain and cost are in the same seconds."""

_MEASURING_SECONDS = 2.0
"""What measuring all links may take."""
_LEAST_SECONDS, _MOST_SECONDS = 1e-3, 0.05
"""A transfer that is measured takes as long as this: shorter ones say little, longer ones no more."""


def check_topology(
    arguments: MuxArguments, experts: Experts, layers: int, continued: bool
) -> tuple[Topology | None, str]:
    """Read the topology file of a run, before anything is loaded.

    Args:
        layers: Layers with experts.
        continued: Whether the run continues a save: then the file may be for more expert managers, the first of which
            are those of this run.

    Returns:
        The topology, None if no file is given; and what a user should know.

    Raises:
        UserError: It is unreadable, wrong, or for another number of expert ranks, or has no room for all experts.
    """
    file = arguments.mux_expert_topology
    if file is None:
        return None, ""
    found, managers = read_topology(file), arguments.expert_managers
    workers, said = managers or arguments.expert_model_parallel_size, ""
    what = "expert managers" if managers else "expert ranks"
    count, flag = len(found.workers), f"--mux-expert-topology {file}"
    gone = managers and continued and count > managers
    if count != workers and not gone:
        raise UserError(f"{flag}: workers: has {count} entries, but there are {workers} {what}")
    try:
        if managers:
            found.from_master()
        if gone:
            found = found.of_first(managers)
            said = (
                f"{flag}: has {count} workers, and expert managers there are {managers}: its first {managers} count, "
                "with their room and links (if others are left, give a topology of those)"
            )
        found.check_capacity(layers, experts.count)
    except UserError as error:
        raise UserError(*(f"{flag}: {problem}" for problem in error.problems)) from None
    if not managers:  # every expert rank sends its own rows
        return found.model_copy(update={"master_node": None, "master_bandwidth": None}), ""
    if arguments.mux_expert_capacity:
        raise UserError(f"--mux-expert-capacity: contradicts the capacities in {flag}")
    return found, said


def topology_of_hosts(parallel: Parallel, room: Sequence[int], measured: bool) -> tuple[Topology, str]:
    """Workers on the hosts of this run's ranks, with measured bandwidths or assumed ones. Every rank calls it.

    Args:
        parallel: Where this rank stands. If groups of expert ranks are on different hosts, the first group counts.
        room: Experts that each worker can hold over all layers.
        measured: Whether to measure: a second or two. Between very many hosts that does not do: then they are assumed.

    Returns:
        The topology; and what was measured, empty if nothing was.
    """
    ranks, hosts = parallel.experts, everyones(socket.gethostname(), parallel)
    group = from_first(dist.get_process_group_ranks(ranks.group), parallel)[:: ranks.tensor_size]
    first = ranks.first_worker
    workers = tuple(
        Worker(node=hosts[rank], capacity=count) for rank, count in zip(group[first:], room, strict=True)
    )
    master_node = hosts[group[0]] if first else None
    seconds = transfer_seconds(hosts, _MEASURING_SECONDS)
    if not measured or seconds < _LEAST_SECONDS:
        links = BandwidthClasses(within_node=WITHIN_NODE, between_nodes=BETWEEN_NODES)
        shared = {hosts[rank]: Uplink(up=BETWEEN_NODES, down=BETWEEN_NODES) for rank in group}
        return Topology(workers=workers, bandwidth=links, master_node=master_node, uplinks=shared), ""
    parallel.heartbeat.at("measuring links", long=True)
    began = time.perf_counter()
    found = measure_links(LinkMeter(parallel, min(seconds, _MOST_SECONDS)), hosts, all_pairs=False)
    took = parallel.most([time.perf_counter() - began])[0]
    topology = Topology(
        workers=workers,
        bandwidth=found.bandwidth[np.ix_(group[first:], group[first:])].tolist(),
        master_node=master_node,
        master_bandwidth=_both_ways(found.bandwidth, group) if first else None,
        uplinks={
            node: Uplink(up=found.up[node], down=found.down[node])
            for node in {hosts[rank] for rank in group}
            if node in found.up
        },
    )
    return from_first(topology, parallel), _described(found, hosts, took)


def _both_ways(bandwidth: Floats, group: Sequence[int]) -> list[float]:
    """[N] bandwidth between the master, the first of a group, and each of the others."""
    both: list[float] = np.minimum(bandwidth[group[0], group[1:]], bandwidth[group[1:], group[0]]).tolist()
    return both


def _described(found: MeasuredLinks, hosts: Sequence[str], seconds: float) -> str:
    """What was measured, for the log."""
    said = []
    for what, alike in (("within a host", True), ("between hosts", False)):
        pairs = [
            (i, j) for i, a in enumerate(hosts) for j, b in enumerate(hosts) if i != j and (a == b) == alike
        ]
        speeds = [float(found.bandwidth[pair]) / 1e9 for pair in pairs]
        if speeds:
            said.append(f"{min(speeds):.3g} to {max(speeds):.3g} GB/s {what}")
    if found.up:
        said.append(
            f"{min([*found.up.values(), *found.down.values()]) / 1e9:.3g} GB/s or more shared by a host's ranks"
        )
    return f"links measured in {seconds:.2f} s: {', '.join(said)}"
