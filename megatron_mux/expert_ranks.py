"""The ranks among which the experts of a backbone are divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.expert_shape import Placement

T = TypeVar("T")

Feature = Literal[
    "backbone without experts",
    "weights elsewhere",
    "quantised weights",
    "own rows",
    "preferences",
    "optimizer",
]
"""What some ranks of experts do not go with."""


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
        role: What messages call this process beside its rank; empty: its pipeline stage.
        first_worker: The first expert rank that holds experts.
        divides_adapters: Whether a rank has the adapters of its own experts alone; else it has those of all experts.
        holds_rows: Whether sequences of tasks are computed here; else there are routed experts and nothing else.
        exchange: How rows reach their experts: see `backbone.experts.layer.EXCHANGES`.
    """

    rank: int
    size: int
    tensor_rank: int
    tensor_size: int
    group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    over_data: bool
    role: str = ""

    first_worker: ClassVar[int] = 0
    divides_adapters: ClassVar[bool] = False
    holds_rows: ClassVar[bool] = True
    exchange: ClassVar[str] = "all to all"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Expert parallel and expert tensor parallel size and number of managers, as `initialize` takes them."""
        return self.size, self.tensor_size, 0

    def placement(self, experts: int, layers: Sequence[int]) -> Placement:
        """Which ranks hold which experts, unless somebody says otherwise."""
        return Placement.contiguous(experts, self.size, layers)

    def share(self, rows: Sequence[T]) -> Sequence[T]:
        """What this process computes of the tasks' rows, or of what they come from: all of it, or nothing."""
        return rows if self.holds_rows else ()

    def strip(self, model: Any) -> None:
        """Remove the modules of a stage, Megatron's with our sublayers, that this process does not compute."""

    def adapter_part(
        self, dense: tuple[int | None, Tensor | None], expert_dim: int, places: Callable[[], Tensor]
    ) -> tuple[int | None, Tensor | None]:
        """Which part of a tensor of experts' adapters is on this process: dimension and places along it.

        Args:
            dense: As tensor ranks divide it.
            expert_dim: The dimension along which ranks of experts lie.
            places: Returns those of the experts that this process holds.
        """
        return dense

    def connect(self, device: torch.device) -> None:
        """Have NCCL connect these ranks, as far as the world's groups do not."""

    def refuse(self, feature: Feature, *names: str) -> None:
        """Raise a `UserError` with these names if these ranks do not go with a feature."""

    def leave(self) -> None:
        """Destroy the groups that Megatron-Core did not make."""


def size_problems(world_size: int, tensor: int, pipeline: int, expert: int, expert_tensor: int) -> list[str]:
    """What keeps so many processes from being divided so; empty where nothing does.

    Args:
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


def expert_ranks(mpu: Any, tensor: int) -> ExpertRanks:
    """This process in Megatron-Core's expert groups."""
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
