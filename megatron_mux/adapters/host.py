"""The backbone's stage that an adapter attaches to: its BaseOps, shape, ranks and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mux.base_ops import BaseOpInfo, ModuleColumns
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape, Module


@dataclass(frozen=True)
class Site:
    """A module that a task targets, inside a BaseOp of this stage.

    Attributes:
        module: The module.
        info: The BaseOp.
        part: Its place in the BaseOp's output on this rank.
    """

    module: Module
    info: BaseOpInfo
    part: ModuleColumns

    @property
    def path(self) -> str:
        """Full Hugging Face path of the module."""
        return self.module.path

    @property
    def inputs(self) -> Tensor:
        """`[K]` int64 global input features that this rank holds."""
        return torch.arange(self.info.inputs.start, self.info.inputs.stop)

    def columns(self, device: torch.device) -> Tensor | None:
        """The module's columns of the BaseOp's output, None where it is all of them in order."""
        columns = self.part.columns
        weight: Any = self.info.module.weight
        width = weight.shape[0]
        if columns.shape[0] == width and bool((columns.cpu() == torch.arange(width)).all()):
            return None
        return columns.to(device)


class Host:
    """A stage of the backbone, as adapters see it.

    Args:
        base_ops: The stage's BaseOps.
        parallel: Where this rank stands.
        dtype: The backbone's compute dtype; adapter parameters are fp32, or fp64 on an fp64 backbone.
        shape: The backbone's sizes.
    """

    def __init__(
        self, base_ops: Sequence[BaseOpInfo], parallel: Parallel, dtype: torch.dtype, shape: BackboneShape
    ) -> None:
        self.base_ops = list(base_ops)
        self.parallel = parallel
        self.dtype = dtype
        self.parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.shape = shape
        self.device = torch.device(parallel.device)

    @property
    def layers(self) -> list[int]:
        """Global indices of the layers of this stage, ascending."""
        return sorted({info.layer for info in self.base_ops})

    def sites(self, modules: Sequence[Module]) -> Iterator[tuple[int, list[Site]]]:
        """Yield the modules that are on this stage, BaseOp by BaseOp."""
        wanted = {module.path: module for module in modules}
        for op, info in enumerate(self.base_ops):
            placed = [(wanted.get(f"{info.hf_prefix}.{path}"), part) for path, part in info.parts.items()]
            found = [Site(module, info, part) for module, part in placed if module is not None]
            if found:
                yield op, found
