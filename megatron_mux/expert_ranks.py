"""The ranks among which the experts of a backbone are divided."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_AT_ONCE = 8
"""Messages to a rank that may be on their way: as many hybrid tasks may wait for it at once."""


@dataclass(eq=False)
class Leaving:
    """A message on its way, which must not change meanwhile."""

    work: dist.Work | None
    message: Tensor | None

    def wait(self) -> None:
        """Return once it has left: at once if there is an answer to it."""
        if self.work is not None:
            self.work.wait()
        self.work = self.message = None


@dataclass
class Outbox:
    """Sends messages without waiting; each is kept until it has left.

    Attributes:
        most: Messages that may be on their way; one more waits until the first of them has left.
    """

    most: int
    _leaving: deque[Leaving] = field(default_factory=deque)

    def send(self, message: Tensor, to: int, group: dist.ProcessGroup) -> Leaving:
        """Send a contiguous tensor to a rank of a group."""
        if len(self._leaving) >= self.most:
            self._leaving.popleft().wait()
        self._leaving.append(Leaving(dist.isend(message, group=group, group_dst=to), message))
        return self._leaving[-1]


@dataclass(frozen=True)
class Broker:
    """A master and its expert managers (VELA, section IV.A): what they exchange, and over which connections.

    Expert rank 0 is the master, with all of the backbone but its routed experts; the others are managers 1, 2 and so
    on, with nothing but routed experts. Each kind of message has a group of its own, so that none waits for another.

    Attributes:
        headers: From the master to managers, between hosts' memories.
        forth: From the master to managers.
        back: From managers to the master.
        outbox: Of this process.
    """

    headers: dist.ProcessGroup
    forth: dist.ProcessGroup
    back: dist.ProcessGroup
    outbox: Outbox

    def connect(self, device: torch.device) -> None:
        """Send something both ways: NCCL connects at the first message, for which the host waits."""
        rank, size = self.forth.rank(), self.forth.size()
        flag = torch.zeros(1, device=device)
        for manager in range(1, size):
            for group, sender, receiver in ((self.forth, 0, manager), (self.back, manager, 0)):
                if rank == sender:
                    dist.send(flag, group=group, group_dst=receiver)
                elif rank == receiver:
                    dist.recv(flag, group=group, group_src=sender)


@dataclass(frozen=True)
class ExpertRanks:
    """This process among the ranks that together hold each expert of its stage once.

    An expert rank holds some of the experts; several tensor ranks may divide each of its experts. All are in one group,
    tensor ranks of the same expert rank next to each other, as Megatron-Core lays them out.

    Attributes:
        rank, size: Expert rank of this process, and how many there are.
        tensor_rank, tensor_size: This process among the ranks that divide the matrices of an expert.
        group: All of them.
        data_group: The processes that hold the same experts.
        over_data: Whether a rank without rows computes those of others: then all of them make equal passes.
        broker: Connects a master and its expert managers; None: every rank has rows of its own.
    """

    rank: int
    size: int
    tensor_rank: int
    tensor_size: int
    group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    over_data: bool
    broker: Broker | None = None

    @property
    def is_manager(self) -> bool:
        """Whether this process holds routed experts and nothing else."""
        return self.broker is not None and self.rank > 0


def size_problems(world_size: int, tensor: int, pipeline: int, expert: int, expert_tensor: int) -> list[str]:
    """What keeps so many processes from being divided so; empty where nothing does.

    Args:
        world_size: Processes.
        tensor, pipeline: Sizes of tensor and pipeline parallelism.
        expert: Number of expert ranks.
        expert_tensor: Number of tensor ranks that divide an expert.
    """
    for name, size in (("expert", expert), ("expert tensor", expert_tensor)):
        if size < 1:
            return [f"The {name} parallel size must be at least 1, not {size}."]
    stage, divided = world_size // pipeline, expert * expert_tensor
    sizes = f"Expert parallel size {expert} x expert tensor parallel size {expert_tensor}"
    if stage % divided:
        return [f"{sizes} does not divide the {stage} processes of a pipeline stage."]
    if divided % tensor and tensor % divided:
        return [f"{sizes} must divide tensor parallel size {tensor} or be a multiple of it."]
    return []


def manager_problems(world_size: int, managers: int) -> list[str]:
    """What keeps so many processes from being a master and its managers; empty where nothing does."""
    if world_size == managers + 1:
        return []
    are = "process was" if world_size == 1 else "processes were"
    needed = f"{managers} expert manager{'s' * (managers > 1)} and their master are {managers + 1} processes"
    how = f"use torchrun --nproc-per-node {managers + 1}, or on several hosts as many in total"
    return [f"--mux-expert-managers: {needed}, but {world_size} {are} started: {how}."]


def expert_ranks(mpu: Any, tensor: int) -> ExpertRanks:
    """This process in Megatron-Core's expert groups.

    Args:
        mpu: Megatron-Core's `parallel_state`.
        tensor: Tensor parallel size.
    """
    group = mpu.get_expert_tensor_and_model_parallel_group()
    own_tensor = mpu.get_expert_tensor_parallel_group()
    return ExpertRanks(
        rank=mpu.get_expert_model_parallel_rank(),
        size=mpu.get_expert_model_parallel_world_size(),
        tensor_rank=own_tensor.rank(),
        tensor_size=own_tensor.size(),
        group=group,
        data_group=mpu.get_expert_data_parallel_group(),
        over_data=group.size() > tensor,
    )


def broker_ranks(alone: dist.ProcessGroup, device: torch.device, timeout_minutes: float) -> ExpertRanks:
    """This process as the master (rank 0) or an expert manager. Every rank of the world calls it.

    Args:
        alone: A group of this process only.
        device: That it computes on.
        timeout_minutes: How long an exchange waits for the other process.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    both, headers, forth, back = (
        dist.new_group(backend=name, timeout=timeout) for name in (None, "gloo", backend, backend)
    )
    size = dist.get_world_size()
    peers = size - 1 if dist.get_rank() == 0 else 1
    return ExpertRanks(
        rank=dist.get_rank(),
        size=size,
        tensor_rank=0,
        tensor_size=1,
        group=both,
        data_group=alone,
        over_data=True,
        broker=Broker(headers, forth, back, Outbox(_AT_ONCE * peers)),
    )


def leave(ranks: ExpertRanks) -> None:
    """Destroy the groups that `broker_ranks` made."""
    broker = ranks.broker
    for group in () if broker is None else (ranks.group, broker.headers, broker.forth, broker.back):
        dist.destroy_process_group(group)
