"""Processes, groups and device: joining the world, with a launcher or without, on GPUs with NCCL or CPUs with gloo.

Importing this module changes nothing and costs nothing; `initialize` imports Megatron-Core, which takes seconds.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_mux import megatron_core, world
from megatron_mux.errors import UserError
from megatron_mux.expert_managers import managed_experts
from megatron_mux.expert_ranks import ExpertRanks, expert_ranks
from megatron_mux.liveness import Heartbeat

GRADIENTS_AT_ONCE = 1 << 22
"""Elements of adapters' gradients that one collective sums over ranks, unless a single gradient has more."""

ISA_VARIABLE, ISA = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
"""The newest instructions that oneDNN uses on a CPU, unless the user has chosen others: those before AMX.

With AMX (torch 2.13, a Xeon) gradients in bf16 are not finite now and then: `test_half_precision_is_near_single` failed
in 8 of 8 runs, and in none of 11 without.
"""

_current: Parallel | None = None


@dataclass(frozen=True)
class Parallel:
    """Ranks, groups and device of this process.

    Ranks are laid out as Megatron does: neighbours in the world share a tensor group, then data, then pipeline.

    Attributes:
        rank, world_size: Of this process in the world.
        tp_rank, tp_size, tp_group: Tensor parallelism: a layer's matrices are divided among these.
        pp_rank, pp_size, pp_group: Pipeline parallelism: layers are divided among these, stage by stage.
        dp_rank, dp_size, dp_group: Data parallelism: sequences are divided among these. Expert managers have none, and
            are in the pipeline of their master.
        model_group: The ranks that together hold one copy of the backbone (tensor x pipeline), its experts aside; of a
            master and its managers, all.
        experts: The ranks that experts are divided among.
        device: The device this process computes on.
        sequence_parallel: Between tensor-parallel regions, each tensor rank holds its part of the rows.
        heartbeat: Tells the other ranks what this process is doing.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    pp_group: dist.ProcessGroup
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    experts: ExpertRanks
    device: torch.device
    sequence_parallel: bool
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)

    @classmethod
    def alone(cls, device: torch.device | str) -> Parallel:
        """A process by itself, without process groups: it needs neither Megatron-Core nor torch's world."""
        nothing: Any = None
        experts = ExpertRanks(0, 1, 0, 1, nothing, nothing, over_data=False)
        own, chosen = (0, 1, nothing), _without_amx(torch.device(device))
        return cls(0, 1, *own, *own, *own, nothing, experts, chosen, sequence_parallel=False)

    @property
    def is_alone(self) -> bool:
        """Whether `alone` made it."""
        return self.tp_group is None

    @property
    def pipeline_ranks(self) -> list[int]:
        """The ranks of this pipeline, stage by stage."""
        return [0] if self.is_alone else dist.get_process_group_ranks(self.pp_group)

    @property
    def model_ranks(self) -> list[int]:
        """The ranks that together hold one copy of the backbone."""
        return [0] if self.is_alone else dist.get_process_group_ranks(self.model_group)

    def total(self, flags: Sequence[bool]) -> list[int]:
        """Count the ranks of the world that raise each flag. A collective, which every rank calls with its own."""
        if self.world_size == 1:
            return [int(flag) for flag in flags]
        counts = torch.tensor([int(flag) for flag in flags], device=self.device)
        dist.all_reduce(counts)
        totals: list[int] = counts.tolist()
        return totals

    def most(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks of the world. A collective, which every rank calls with its own."""
        if self.world_size == 1:
            return list(values)
        table = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        largest: list[float] = table.tolist()
        return largest

    @property
    def sizes(self) -> tuple[object, ...]:
        """Everything that `initialize` divides the world by, in the order of its arguments; and the device."""
        return (self.tp_size, self.pp_size, self.sequence_parallel, self.device, *self.experts.sizes)

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage computes the loss."""
        return self.pp_rank == self.pp_size - 1


def initialize(
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    sequence_parallel: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    timeout_minutes: float = 30,
    expert_parallel: int = 1,
    expert_tensor_parallel: int = 1,
    expert_managers: int = 0,
) -> Parallel:
    """Join the other processes and divide them into tensor, pipeline and data parallel groups.

    The world comes from torchrun's environment; without it this process is the whole world. Called again with other
    sizes, it makes the groups again in the same world; with the same sizes it does nothing.

    Args:
        tensor_parallel: Number of ranks that share each layer.
        pipeline_parallel: Number of ranks that layers are divided among.
        sequence_parallel: Divide the rows among tensor ranks between their regions.
        seed: For Python's and torch's generators, the same on every rank. No result depends on them.
        device: To compute on; by default this process's GPU, or the CPU if there is none.
        timeout_minutes: How long a collective waits for the others before it fails.
        expert_parallel: Number of ranks that the experts of a layer are divided among.
        expert_tensor_parallel: Number of ranks that share each expert.
        expert_managers: Number of processes that hold the first rank's experts only; then all other sizes are 1.

    Returns:
        Ranks, groups and device of this process.

    Raises:
        UserError: The sizes do not fit the processes or each other, or torchrun's environment is incomplete.
    """
    global _current
    rank, world_size = world.rank_and_size()
    experts = expert_parallel, expert_tensor_parallel, expert_managers
    world.check_sizes(world_size, tensor_parallel, pipeline_parallel, sequence_parallel, *experts)
    chosen = _without_amx(_choose_device(device))
    world.join(rank, world_size, chosen, timeout_minutes)
    random.seed(seed)
    torch.manual_seed(seed)
    with megatron_core.quiet():
        from megatron.core import parallel_state as mpu
    if chosen.type == "cpu" or not is_dry_run():  # a dry run replaces what it needs to by itself
        megatron_core.adapt_to(chosen)
    wanted = (tensor_parallel, pipeline_parallel, sequence_parallel, chosen, *experts)
    if _current is not None and _current.sizes == wanted:
        return _current
    _leave_groups(mpu)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_minutes,
    )
    placed = _place(mpu, chosen, sequence_parallel)
    _current = _with_managers(placed, timeout_minutes) if expert_managers else placed
    return _current


def _with_managers(alone: Parallel, timeout_minutes: float) -> Parallel:
    """The place of the master or of an expert manager, whose other groups have this process only."""
    own = alone.tp_group
    experts = managed_experts(own, alone.device, timeout_minutes)
    return replace(alone, dp_rank=0, dp_size=1, dp_group=own, model_group=experts.group, experts=experts)


def _place(mpu: Any, device: torch.device, sequence_parallel: bool, **groups: dist.ProcessGroup) -> Parallel:
    """Ranks, groups and device of this process, from Megatron-Core's groups unless others are given."""
    groups = {
        "tp": mpu.get_tensor_model_parallel_group(),
        "pp": mpu.get_pipeline_model_parallel_group(),
        "dp": mpu.get_data_parallel_group(),
        **groups,
    }
    places: dict[str, Any] = {}
    for name, group in groups.items():
        places |= {f"{name}_rank": group.rank(), f"{name}_size": group.size(), f"{name}_group": group}
    return Parallel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        model_group=mpu.get_model_parallel_group(),
        experts=expert_ranks(mpu, places["tp_size"]),
        device=device,
        sequence_parallel=sequence_parallel,
        **places,
    )


def adopt(device: torch.device, sequence_parallel: bool = False, groups: Any = None) -> Parallel:
    """Ranks, groups and device in groups that another program made with Megatron-Core; changes nothing.

    Args:
        device: The device that program computes on.
        sequence_parallel: Whether its model divides rows among tensor ranks.
        groups: Its `ProcessGroupCollection`, of which `tp` and `pp` replace Megatron-Core's global groups.

    Raises:
        UserError: It made none.
    """
    with megatron_core.quiet():
        from megatron.core import parallel_state as mpu
    if not mpu.model_parallel_is_initialized():
        raise UserError("Megatron-Core has no groups yet: call its initialize_model_parallel first.")
    own = {} if groups is None else {"tp": groups.tp, "pp": groups.pp}
    return _place(mpu, device, sequence_parallel, **own)


def shutdown() -> None:
    """Leave the groups and the world, and undo `initialize`. Harmless where nothing was initialised."""
    global _current
    if not dist.is_initialized():
        return
    if _current is not None:
        from megatron.core import parallel_state as mpu

        _leave_groups(mpu)
        _current = None
    megatron_core.adapt_to(None)
    dist.destroy_process_group()


def _leave_groups(mpu: Any) -> None:
    """Destroy Megatron-Core's groups: it only forgets them, and each would keep its threads and sockets."""
    if _current is not None:
        _current.experts.leave()
    for group in getattr(mpu, "_global_process_group_list", None) or []:
        if group is not None:
            dist.destroy_process_group(group)
    mpu.destroy_model_parallel()


def _without_amx(device: torch.device) -> torch.device:
    """The device, for whose operators oneDNN uses no newer instructions than `ISA`; its first operator reads that."""
    if device.type == "cpu":
        os.environ.setdefault(ISA_VARIABLE, ISA)
    return device


@lru_cache(maxsize=1)
def has_varlen() -> bool:
    """Whether this torch has the variable-length kernel, with windows and scales: since torch 2.11."""
    try:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return False
    return {"window_size", "scale"} <= set(inspect.signature(kernel).parameters)


def _choose_device(wanted: torch.device | str | None) -> torch.device:
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cpu" or is_dry_run():
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UserError(f"The device {str(device)!r} is not there: this machine has a CPU only.")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index is None and local > torch.cuda.device_count():
        # Every process of the machine sees this, so it is said whichever of them may speak.
        raise UserError(
            f"{local} processes were started on a machine with {torch.cuda.device_count()} GPU(s): start one per GPU."
        )
    if device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.index >= torch.cuda.device_count():
        raise UserError(
            f"This process wants GPU {device.index}, but the machine has {torch.cuda.device_count()}: "
            "start one process per GPU."
        )
    if not has_varlen():
        raise UserError(
            f"torch {torch.__version__} has no variable-length attention that takes windows and scales: on a GPU, "
            "install torch 2.11 or newer."
        )
    torch.cuda.set_device(device)
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 by itself, attention included."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def finish(device: torch.device) -> None:
    """Wait until a GPU has computed what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use_tf32() -> None:
    """Compute fp32 products of this process in TF32, on GPUs."""
    torch.backends.cuda.matmul.allow_tf32 = True


def uses_tf32() -> bool:
    """Whether `use_tf32` was called."""
    found: bool = torch.backends.cuda.matmul.allow_tf32
    return found


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None on a CPU, which shares its memory with everything else."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def held_and_allowed_memory(device: torch.device) -> tuple[int, int] | None:
    """The most bytes of a GPU's memory that this process has held, and what it may hold now; None on a CPU.

    Others' memory is not there for it, nor what is beyond `torch.cuda.set_per_process_memory_fraction`.
    """
    if not is_gpu(device):
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return torch.cuda.max_memory_reserved(device), min(free + torch.cuda.memory_reserved(device), share)


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU that is there, not one of a dry run."""
    return device.type == "cuda" and not is_dry_run()


def pinned(size: int, device: torch.device | str) -> torch.Tensor | None:
    """`[size]` uint8 of pinned host memory, for copies that the host does not wait for; None without a real GPU.

    Getting it may wait for everything on the GPU.
    """
    if torch.device(device).type != "cuda" or not torch.cuda.is_available() or is_dry_run():
        return None
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def to_device(
    host: torch.Tensor, device: torch.device | str, staging: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy a tensor to a GPU, in order with its stream; the host does not wait.

    Args:
        host: In host memory.
        device: The GPU. On a CPU it is the tensor itself.
        staging: Pinned memory of that many bytes, to be left alone until the GPU has copied it; None takes some from
            torch, which may wait for the GPU where it has to allocate it.
    """
    staging = pinned(host.nbytes, device) if staging is None else staging
    if staging is not None:
        host = staging.view(host.dtype).view(host.shape).copy_(host)
    return host.to(device, non_blocking=True)


def is_dry_run() -> bool:
    """Whether this is a dry run (simulated world), see `megatron_mux.dry_run`."""
    return dist.is_initialized() and dist.get_backend() == "fake"
