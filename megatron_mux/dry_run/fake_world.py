"""A rank of a world in which tensors have no values and other ranks send the same as this one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_mux import runtime
from megatron_mux.attributes import replaced
from megatron_mux.dry_run.known_values import assumed_routes
from megatron_mux.dry_run.real_host import RealHostMode, gather_own_object
from megatron_mux.expert_shape import Placement
from megatron_mux.gpus import Gpu
from megatron_mux.memory.assumed_routes import Access
from megatron_mux.memory.fake_gpu.device import DEVICE, fake_gpu
from megatron_mux.memory.fake_gpu.fake_tensors import FakeTensors
from megatron_mux.runtime import Parallel


class UniformParallel(Parallel):
    """A rank's place in a fake world: reductions assume that all ranks contribute the same values."""

    def total(self, flags: Sequence[bool]) -> list[int]:
        """See `Parallel.total`."""
        super().total(flags)
        return [self.world_size * int(flag) for flag in flags]

    def most(self, values: Sequence[float]) -> list[float]:
        """See `Parallel.most`."""
        super().most(values)
        return list(values)


@contextlib.contextmanager
def fake_rank(
    rank: int,
    world: int,
    device: Literal["cuda", "cpu"],
    gpu: Gpu,
    tensor: int = 1,
    pipeline: int = 1,
    sequence_parallel: bool = False,
    expert: int = 1,
    expert_tensor: int = 1,
    placement: Placement | None = None,
    access: Access | None = None,
) -> Iterator[tuple[UniformParallel, RealHostMode]]:
    """Inside, tensors are fake, but for integers in host memory. A process is one rank at a time.

    Args:
        device: `cuda` for a fake GPU; `cpu` uses CPU kernels.
        tensor, pipeline, sequence_parallel, expert, expert_tensor: See `runtime.initialize`.
        placement, access: See `assumed_routes`.

    Returns:
        Its place, and the mode, which knows in which process groups tensors were exchanged.

    Raises:
        UserError: The world cannot be divided so.
        NoFakeGpu: This process cannot have a fake GPU.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    with contextlib.ExitStack() as stack:
        stack.callback(runtime.shutdown)
        stack.enter_context(replaced(dist, "all_gather_object", gather_own_object))
        if device == "cuda":
            stack.enter_context(fake_gpu(gpu))
            stack.enter_context(replaced(torch.cuda, "current_device", lambda: DEVICE))
            stack.enter_context(replaced(torch.Tensor, "pin_memory", lambda tensor: tensor))
        else:
            stack.enter_context(FakeTensors())
        parallel = runtime.initialize(
            tensor,
            pipeline,
            sequence_parallel,
            device=DEVICE if device == "cuda" else torch.device("cpu"),
            expert_parallel=expert,
            expert_tensor_parallel=expert_tensor,
        )
        stack.enter_context(assumed_routes(parallel.experts, placement, access))
        host = stack.enter_context(RealHostMode())
        yield UniformParallel(**vars(parallel)), host
