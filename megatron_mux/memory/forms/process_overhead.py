"""Memory that a process takes on a GPU besides tensors: its context, communicators, cuBLAS's workspaces.

Sizes are those of `memory.untraced`, like what is put into a traced stream. What kernels take within an operator is
counted with the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.untraced import (
    COMMUNICATOR,
    CONTEXT,
    TABLE,
    THREADS,
    communicator,
    context,
    cublas_of,
)


@dataclass(frozen=True)
class ProcessOverhead:
    """Bytes of a process.

    Attributes:
        context: The CUDA context with its kernels.
        group: Buffers of a NCCL communicator.
        blas: cuBLAS's workspaces, one for each thread; they alone go through torch's allocator.
    """

    context: int = field(default_factory=context)
    group: int = field(default_factory=communicator)
    blas: int = field(default_factory=lambda: THREADS * cublas_of(Gpu()))

    @classmethod
    def of(cls, gpu: Gpu) -> Self:
        """On such a GPU."""
        return cls(blas=THREADS * cublas_of(gpu))

    @classmethod
    def none(cls) -> Self:
        """Tensors alone."""
        return cls(0, 0, 0)

    def total(self, method: Method, most: bool | None = None, trainer: bool = False) -> int:
        """What does not go through the allocator: the context, and a communicator for each kind of parallelism, one for
        all ranks, and one to each neighbour.

        Args:
            method: How the step is divided.
            most: The most there may be, or the least; None for what is likely.
            trainer: Whether it is a run of `transformers.Trainer`, all of whose ranks are data-parallel: they have
                torch's default group alone.
        """
        kinds = (method.data, method.tensor, method.expert)
        groups = sum(size > 1 for size in kinds) + 2 * (method.pipeline > 1) + (method.gpus > 1)
        if trainer:
            groups = int(method.gpus > 1)
        sizes = {CONTEXT: self.context, COMMUNICATOR: groups * self.group}
        if most is None:
            return sum(sizes.values())
        entries = {name: TABLE[name] for name in sizes}
        return round(sum(sizes[n] * (e.most if most else e.least) for n, e in entries.items()))
