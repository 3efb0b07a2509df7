"""The world: its processes, as a launcher's environment names them, and the sizes that it can be divided by."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_mux.errors import UserError
from megatron_mux.expert_managers import manager_problems
from megatron_mux.expert_ranks import size_problems

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_and_size() -> tuple[int, int]:
    """Rank and world size from the running world or torchrun's environment; (0, 1) without either.

    Raises:
        UserError: The environment is incomplete.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    present = [name for name in _TORCHRUN if name in os.environ]
    if not {"RANK", "WORLD_SIZE"} & set(present):
        return 0, 1
    missing = [name for name in _TORCHRUN if name not in present]
    if missing:
        raise UserError(
            f"The environment sets {', '.join(present)} but not {', '.join(missing)}: "
            "start with torchrun, or unset them to run in one process."
        )
    values = {}
    for name in ("RANK", "WORLD_SIZE"):
        try:
            values[name] = int(os.environ[name])
        except ValueError:
            raise UserError(
                f"The environment variable {name} must be a number, not {os.environ[name]!r}."
            ) from None
    return values["RANK"], values["WORLD_SIZE"]


def check_sizes(
    world_size: int,
    tensor: int,
    pipeline: int,
    sequence_parallel: bool,
    expert: int,
    expert_tensor: int,
    managers: int,
) -> None:
    """Check that a world can be divided so; the arguments are those of `runtime.initialize`.

    Raises:
        UserError: It cannot.
    """
    problems = [
        f"The {name} parallel size must be at least 1, not {size}."
        for name, size in (("tensor", tensor), ("pipeline", pipeline))
        if size < 1
    ]
    if not problems and world_size % (tensor * pipeline):
        problems.append(
            f"{world_size} process{'es' * (world_size > 1)} cannot be divided into models of tensor parallel size "
            f"{tensor} x pipeline parallel size {pipeline}: start a multiple of {tensor * pipeline} processes "
            f"(torchrun --nproc-per-node {tensor * pipeline})."
        )
    if not problems and sequence_parallel and tensor == 1:
        problems.append("Sequence parallelism needs a tensor parallel size of at least 2.")
    if not problems:
        problems = size_problems(world_size, tensor, pipeline, expert, expert_tensor)
        problems += manager_problems(world_size, managers) if managers else []
    if problems:
        raise UserError(*problems)


def join(rank: int, world_size: int, device: torch.device, timeout_minutes: float) -> None:
    """Join the other processes, unless that has been done.

    Args:
        rank, world_size: From `rank_and_size`.
        device: To compute on.
        timeout_minutes: How long a collective waits for the others before it fails.
    """
    # torch renames collectives faster than Megatron-Core follows.
    warnings.filterwarnings(
        "ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning
    )
    if dist.is_initialized():
        return
    # With GPUs, gloo carries what little travels between hosts' memories: objects, counts.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # Not bound to the device: NCCL would make each group by splitting the world, in which all ranks must take part.
    arguments: dict[str, Any] = {}
    if world_size == 1:
        # In one process a store in memory will do: no port is taken, so any number may run side by side.
        store = dist.HashStore()  # type: ignore[attr-defined]
        arguments |= {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes), **arguments)
