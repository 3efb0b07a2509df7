"""The workers and links that a run's experts are placed by: from a file, or from the hosts of its ranks."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_mux.arguments import MuxArguments
from megatron_mux.engine.agreement import everyones, from_first
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Experts
from megatron_mux.moe.topology import BandwidthClasses, Topology, Uplink, Worker, read_topology
from megatron_mux.runtime import Parallel

WITHIN_NODE, BETWEEN_NODES = 50e9, 12.5e9
"""Bytes per second that are assumed without a topology file: of NVLink or PCIe 5, and of 100 Gbit/s Ethernet, which
the ranks of a node share. Moves are priced by them too, so that gain and cost are in the same seconds."""


def check_topology(arguments: MuxArguments, experts: Experts, layers: int) -> Topology | None:
    """Read the topology file of a run, before anything is loaded; None if there is none.

    Raises:
        UserError: It is unreadable, wrong, or for another number of expert ranks, or has no room for all experts.
    """
    file = arguments.mux_expert_topology
    if file is None:
        return None
    found, managers = read_topology(file), arguments.expert_managers
    workers = managers or arguments.expert_model_parallel_size
    if len(found.workers) != workers:
        what = "expert managers" if managers else "expert ranks"
        raise UserError(
            f"--mux-expert-topology {file}: workers: has {len(found.workers)} entries, but there are {workers} {what}"
        )
    try:
        found.check_capacity(layers, experts.count)
        if managers:
            found.from_master()
    except UserError as error:
        raise UserError(*(f"--mux-expert-topology {file}: {problem}" for problem in error.problems)) from None
    if not managers:  # every expert rank sends its own rows
        return found.model_copy(update={"master_node": None, "master_bandwidth": None})
    return _refuse_other_room(found, arguments, file)


def _refuse_other_room(topology: Topology, arguments: MuxArguments, file: Path) -> Topology:
    """The topology of managers; refuse a capacity that a flag gives otherwise."""
    if arguments.mux_expert_capacity:
        raise UserError(f"--mux-expert-capacity: contradicts the capacities in --mux-expert-topology {file}")
    return topology


def topology_of_hosts(parallel: Parallel, room: Sequence[int]) -> Topology:
    """Workers on the hosts of this run's ranks, with assumed bandwidths. Every rank calls it.

    Args:
        parallel: Where this rank stands. If groups of expert ranks are on different hosts, the first group counts.
        room: Experts that each worker can hold over all layers.
    """
    ranks, hosts = parallel.experts, everyones(socket.gethostname(), parallel)
    group = from_first(dist.get_process_group_ranks(ranks.group), parallel)
    own = [hosts[rank] for rank in group[:: ranks.tensor_size]]
    workers = own[1:] if ranks.broker is not None else own
    nodes = sorted(set(own))
    return Topology(
        workers=tuple(Worker(node=node, capacity=count) for node, count in zip(workers, room, strict=True)),
        bandwidth=BandwidthClasses(within_node=WITHIN_NODE, between_nodes=BETWEEN_NODES),
        master_node=own[0] if ranks.broker is not None else None,
        uplinks={node: Uplink(up=BETWEEN_NODES, down=BETWEEN_NODES) for node in nodes},
    )
