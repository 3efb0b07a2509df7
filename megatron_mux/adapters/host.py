"""The backbone's stage that an adapter attaches to: its BaseOps, shape, ranks and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.modules import Module, Shape
from megatron_mux.base_ops import BaseOpInfo, ModuleColumns
from megatron_mux.kernels.dropout import key_of
from megatron_mux.runtime import Parallel


@dataclass(frozen=True)
class Site:
    """One Hugging Face module that a task targets, inside a BaseOp of this stage.

    Attributes:
        op: Index of the BaseOp in `Host.base_ops`.
        info: The BaseOp.
        path: Full Hugging Face path of the module.
        part: Its place in the BaseOp's output on this rank.
    """

    op: int
    info: BaseOpInfo
    path: str
    part: ModuleColumns

    @property
    def column_parallel(self) -> bool:
        """Whether the module's output (rather than its input) is divided over tensor ranks."""
        return self.info.parallel == "column"

    @property
    def columns(self) -> Tensor | None:
        """The module's columns of the BaseOp's output, None where it is all of them in order."""
        columns = self.part.columns
        weight: Any = self.info.module.weight
        width = weight.shape[0]
        if columns.shape[0] == width and bool((columns.cpu() == torch.arange(width)).all()):
            return None
        return columns

    @property
    def inputs(self) -> Tensor:
        """`[K]` int64 global input features that this rank holds."""
        return torch.arange(self.info.in_start, self.info.in_stop)


class Host:
    """A stage of the backbone, as adapters see it.

    Args:
        base_ops: The stage's BaseOps.
        parallel: Where this rank stands.
        dtype: The backbone's compute dtype; adapter parameters are fp32, or fp64 on an fp64 backbone.
        shape: The backbone's sizes.
    """

    def __init__(
        self, base_ops: Sequence[BaseOpInfo], parallel: Parallel, dtype: torch.dtype, shape: Shape
    ) -> None:
        self.base_ops = list(base_ops)
        self.parallel = parallel
        self.dtype = dtype
        self.parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.shape = shape
        self.device = torch.device(parallel.device)

    @property
    def first_tensor_rank(self) -> bool:
        """Whether this rank owns the parameters that every tensor rank holds."""
        return self.parallel.tp_rank == 0

    @property
    def layers(self) -> list[int]:
        """Global indices of the layers of this stage, ascending."""
        return sorted({info.layer for info in self.base_ops})

    def sites(self, modules: Sequence[Module]) -> Iterator[tuple[int, list[Site]]]:
        """Yield the modules that are on this stage, BaseOp by BaseOp."""
        wanted = {module.path for module in modules}
        for op, info in enumerate(self.base_ops):
            found = [
                Site(op, info, f"{info.hf_prefix}.{path}", part)
                for path, part in info.parts.items()
                if f"{info.hf_prefix}.{path}" in wanted
            ]
            if found:
                yield op, found

    def generator(self, seed: int, key: str) -> torch.Generator:
        """Make a CPU generator for the initial value of a tensor, the same however the backbone is divided."""
        return torch.Generator().manual_seed(key_of(seed, "initial", key) >> 1)

    def gather(self, local: Tensor, full_shape: tuple[int, ...], dim: int, index: Tensor) -> Tensor:
        """Gather a tensor that is divided over tensor ranks, on each of them. All tensor ranks must call this.

        Args:
            local: This rank's part.
            full_shape: Shape of the whole.
            dim: The divided dimension.
            index: Global positions of the part along `dim`.
        """
        full = local.new_zeros(full_shape)
        full.index_copy_(dim, index.to(local.device), local)
        if self.parallel.tp_size > 1:
            # Each element comes from one rank, the others add zero: exact.
            dist.all_reduce(full, group=self.parallel.tp_group)
        return full
