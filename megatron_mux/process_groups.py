"""Process groups beside those of Megatron-Core: for transfers between stages, hidden messages, and saves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_mux.runtime import Parallel, is_dry_run, is_gpu

_TRANSFER_CTAS = 4
"""Most CTAs that a transfer between stages takes from computation, also while it waits for the other rank."""

Pair = tuple[int, int]
"""Two ranks by their places in a ring."""


def pair_groups(
    ring: Sequence[int], pairs: Sequence[Pair], device: torch.device
) -> dict[tuple[Pair, bool], dist.ProcessGroup]:
    """Process groups for transfers between GPUs, connected: for each pair one in each direction (backward?).

    Every rank of the world calls it, with the same pairs. torch can make a group by its members alone, but names it by
    how many groups the calling rank is in: the two ends of a pair may differ in that, and would wait for each other.

    Args:
        ring: The ranks of this rank's pipeline.
        pairs: Places of neighbours.
        device: This rank's GPU.

    Returns:
        The groups of this ring. This rank can use only those of pairs that it belongs to.
    """
    found = {}
    for other in _all_of(ring):
        for pair in pairs:
            for backward in (False, True):
                group = _pair_group([other[place] for place in (pair[::-1] if backward else pair)], device)
                if other == tuple(ring):
                    found[pair, backward] = group
    return found


def _all_of(ring: Sequence[int]) -> list[tuple[int, ...]]:
    """The rings of all ranks of the world, in the same order on each of them. Every rank calls it."""
    rings: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rings, list(ring))
    return sorted({tuple(ranks) for ranks in rings})


def bounded_tensor_group(parallel: Parallel, ctas: int) -> dist.ProcessGroup:
    """The tensor ranks as a group of their own on GPUs, connected, for messages beside computation.

    Every rank of the world calls it.

    Args:
        parallel: Where this rank stands.
        ctas: CTAs that a collective of the group takes at most from computation.
    """
    own = tuple(dist.get_process_group_ranks(parallel.tp_group))
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in _all_of(own):
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = ctas
        options.is_high_priority_stream = (
            True  # blocks of a message start before those of products that wait already
        )
        made[ranks] = new_group(list(ranks), parallel.device, "nccl", options)
    # Connected now: at its first collective the host would wait for the other ranks.
    dist.all_reduce(torch.zeros(1, device=parallel.device), group=made[own])
    torch.cuda.synchronize(parallel.device)
    return made[own]


def new_group(
    ranks: list[int],
    device: torch.device,
    backend: str,
    options: Any = None,
    limit: timedelta | None = None,
) -> dist.ProcessGroup:
    """Make a process group. Every rank calls it.

    Args:
        ranks: Its members.
        device: This rank's.
        backend: Its backend.
        options: Of the backend.
        limit: How long a collective may wait; None: as long as the world's, where torch would give it its own.
    """
    limit = limit or dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    if options is not None:
        options._timeout = limit  # torch warns where it is another one
    return dist.new_group(ranks, timeout=limit, backend=backend, pg_options=options)  # type: ignore[no-any-return]


def connect(parallel: Parallel) -> None:
    """Have NCCL connect the groups of a step's collectives: at the first one the host would wait for the other ranks.

    Every rank calls it. Nothing is done on a CPU.
    """
    if not is_gpu(parallel.device):
        return
    sizes = {
        parallel.tp_group: parallel.tp_size,
        parallel.dp_group: parallel.dp_size,
        None: parallel.world_size,
    }
    for group, size in sizes.items():  # None: all ranks
        if size > 1:
            dist.all_reduce(torch.zeros(1, device=parallel.device), group=group)
    parallel.experts.connect(parallel.device)
    torch.cuda.synchronize(parallel.device)


def _pair_group(ranks: list[int], device: torch.device) -> dist.ProcessGroup:
    """The group of a link from the first of two ranks to the second."""
    if is_dry_run():
        return dist.new_group(ranks)  # type: ignore[no-any-return]
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _TRANSFER_CTAS
    group = new_group(ranks, device, "nccl", options)
    # Connected now, in the direction of the link: NCCL connects each direction at its first transfer, for which the
    # host waits for the other rank.
    flag = torch.zeros(1, device=device)
    if dist.get_rank() == ranks[0]:
        dist.send(flag, ranks[1], group=group)
    elif dist.get_rank() == ranks[1]:
        dist.recv(flag, ranks[0], group=group)
    return group
