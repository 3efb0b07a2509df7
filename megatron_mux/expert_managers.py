"""A master with all of the backbone but its routed experts, and the expert managers that hold those."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_mux.errors import UserError
from megatron_mux.expert_ranks import ExpertRanks, Feature
from megatron_mux.expert_shape import Placement

_AT_ONCE = 8
"""Messages to a rank that may be on their way: as many hybrid tasks may wait for it at once."""


@dataclass(eq=False)
class PendingSend:
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
    _sends: deque[PendingSend] = field(default_factory=deque)

    def send(self, message: Tensor, to: int, group: dist.ProcessGroup) -> PendingSend:
        """Send a contiguous tensor to a rank of a group."""
        if len(self._sends) >= self.most:
            self._sends.popleft().wait()
        self._sends.append(PendingSend(dist.isend(message, group=group, group_dst=to), message))
        return self._sends[-1]


_REFUSED: dict[Feature, str] = {
    "backbone without experts": "--mux-expert-managers: a {} has no experts: remove it",
    "weights elsewhere": (
        "--mux-backbone-weights {}: not with --mux-expert-managers yet: remove it, or start more managers"
    ),
    "quantised weights": "The backbone is held in {}: not with --mux-expert-managers yet: leave them out",
    "own rows": (
        "task {!r}: modules_to_save and trainable_token_indices are not supported with --mux-expert-managers: leave "
        "them out"
    ),
    "preferences": (
        "task {!r}: training.loss: {} does not run with expert managers: use expert-parallel ranks"
    ),
    "optimizer": (
        "training.optim: {} steps whole tensors, of which expert managers have parts that move: use adamw_torch_fused, "
        "lion_32bit or sgd"
    ),
}
"""What cannot be combined with expert managers, as a user is told."""


@dataclass(frozen=True, kw_only=True)
class ManagedExperts(ExpertRanks):
    """A master, expert rank 0, with all but the routed experts, and its managers 1, 2 and so on (VELA, section IV.A).

    Each kind of message has a group of its own, so that none waits for another.

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

    first_worker: ClassVar[int] = 1
    divides_adapters: ClassVar[bool] = True

    @property
    def sizes(self) -> tuple[int, int, int]:
        """See `ExpertRanks.sizes`: a manager may be without experts."""
        return 1, 1, self.size - 1

    def placement(self, experts: int, layers: Sequence[int]) -> Placement:
        """See `ExpertRanks.placement`."""
        return Placement.among_managers(experts, self.size - 1, layers)

    def adapter_part(
        self, dense: tuple[int | None, Tensor | None], expert_dim: int, places: Callable[[], Tensor]
    ) -> tuple[int | None, Tensor | None]:
        """See `ExpertRanks.adapter_part`: a process has the adapters of its own experts alone."""
        return expert_dim, places()

    def connect(self, device: torch.device) -> None:
        """Send something both ways: NCCL connects at the first message, for which the host waits."""
        flag = torch.zeros(1, device=device)
        for manager in range(1, self.size):
            for group, sender, receiver in ((self.forth, 0, manager), (self.back, manager, 0)):
                if self.rank == sender:
                    dist.send(flag, group=group, group_dst=receiver)
                elif self.rank == receiver:
                    dist.recv(flag, group=group, group_src=sender)

    def refuse(self, feature: Feature, *names: str) -> None:
        """See `ExpertRanks.refuse`."""
        raise UserError(_REFUSED[feature].format(*names))

    def leave(self) -> None:
        """Destroy the groups that `managed_experts` made."""
        for group in (self.group, self.headers, self.forth, self.back):
            dist.destroy_process_group(group)


class Master(ManagedExperts):
    """As the master sees them."""

    exchange: ClassVar[str] = "master"


class ExpertManager(ManagedExperts):
    """As a manager sees them: it holds routed experts and nothing else."""

    holds_rows: ClassVar[bool] = False
    exchange: ClassVar[str] = "manager"

    def strip(self, model: Any) -> None:
        """See `ExpertRanks.strip`: a layer's routed experts are left as its `mlp`, if it has them."""
        kept = []
        for layer in model.decoder.layers:
            has_experts = hasattr(layer.mlp, "experts_fc1")
            if has_experts:
                layer.mlp.router = layer.mlp.shared_experts = None
            kept.append({"mlp": layer.mlp} if has_experts else {})
        for name, _ in list(model.named_children()):
            delattr(model, name)
        model.decoder = nn.Module()
        model.decoder.layers = nn.ModuleList(map(nn.ModuleDict, kept))
        model.decoder.final_layernorm = nn.Identity()


def manager_problems(world_size: int, managers: int) -> list[str]:
    """What keeps so many processes from being a master and its managers; empty where nothing does."""
    if world_size == managers + 1:
        return []
    are = "process was" if world_size == 1 else "processes were"
    needed = f"{managers} expert manager{'s' * (managers > 1)} and their master are {managers + 1} processes"
    how = f"use torchrun --nproc-per-node {managers + 1}, or on several hosts as many in total"
    return [f"--mux-expert-managers: {needed}, but {world_size} {are} started: {how}."]


def managed_experts(alone: dist.ProcessGroup, device: torch.device, timeout_minutes: float) -> ManagedExperts:
    """This process as the master (rank 0) or an expert manager. Every rank of the world calls it.

    Args:
        alone: A group of this process only.
        timeout_minutes: How long an exchange waits for the other process.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    both, headers, forth, back = (
        dist.new_group(backend=name, timeout=timeout) for name in (None, "gloo", backend, backend)
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    return (ExpertManager if rank else Master)(
        rank=rank,
        size=size,
        tensor_rank=0,
        tensor_size=1,
        group=both,
        data_group=alone,
        over_data=True,
        role=f"expert manager {rank}" if rank else "the master",
        headers=headers,
        forth=forth,
        back=back,
        outbox=Outbox(_AT_ONCE * (1 if rank else size - 1)),
    )
