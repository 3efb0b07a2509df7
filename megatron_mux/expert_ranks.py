"""The ranks among which the experts of a backbone are divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


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
        over_data: Whether the group has processes of several data-parallel ranks, which then make equal passes.
    """

    rank: int
    size: int
    tensor_rank: int
    tensor_size: int
    group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    over_data: bool


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
