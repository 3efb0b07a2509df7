"""A stage of the backbone as adapters see it: where they attach, and how ranks divide it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_mux.base_ops import EXPERT_OPS, BaseOpInfo, ModuleColumns
from megatron_mux.kernels.low_rank.columns import Columns
from megatron_mux.kernels.own_rows import Place, VocabularyPart
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape, Module

Weights = Callable[[str], Tensor | None]
"""Returns the whole weight `[out, in]` of the module at a Hugging Face path, as the backbone computes with it, on the
CPU; None where there are no weights, and values do not matter."""


def no_weights(path: str) -> None:
    """Take the place of `Weights` in dry runs and probes."""


@dataclass(frozen=True)
class Site:
    """A module that a task targets, inside a BaseOp of this stage.

    Attributes:
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


class Host:
    """A stage of the backbone, as adapters see it.

    Args:
        dtype: The backbone's compute dtype; adapter parameters are fp32, or fp64 on an fp64 backbone.
        vocabulary: This rank's parts of the embedding and the output layer; None: tasks cannot train rows of them.
        weights: What fresh adapters that depend on weights start from; None: there can be none.
    """

    def __init__(
        self,
        base_ops: Sequence[BaseOpInfo],
        parallel: Parallel,
        dtype: torch.dtype,
        shape: BackboneShape,
        vocabulary: Mapping[Place, VocabularyPart] | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.weights = weights
        self.base_ops = list(base_ops)
        self.vocabulary = vocabulary
        self.parallel = parallel
        self.dtype = dtype
        self.parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.shape = shape
        self.device = torch.device(parallel.device)
        # Requires a gradient and gets none: products whose input needs none have a backward pass all the same.
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._columns: dict[tuple[str, str], tuple[Tensor | None, Columns]] = {}
        self._within: range | None = None

    def within(self, layers: range) -> Host:
        """The stage as an adapter sees it that attaches to some of its layers only, by their global indices."""
        part = copy(self)
        part._within = layers
        return part

    @property
    def layers(self) -> list[int]:
        """Global indices of the layers of this stage, ascending; none on an expert manager, which has parts of them."""
        return sorted({info.layer for _, info in self._ops if info.name not in EXPERT_OPS})

    @property
    def _ops(self) -> list[tuple[int, BaseOpInfo]]:
        within = self._within
        return [(op, info) for op, info in enumerate(self.base_ops) if within is None or info.layer in within]

    def columns(self, site: Site) -> Tensor | None:
        """`[n]` int32, a module's columns of its BaseOp's output; None where it is all of them in order.

        All layers share them.
        """
        return self._placed(site)[0]

    def place(self, site: Site) -> Columns:
        """The same columns, read in host memory: nobody waits for a GPU."""
        return self._placed(site)[1]

    def _placed(self, site: Site) -> tuple[Tensor | None, Columns]:
        key = (site.info.name, site.path.removeprefix(site.info.hf_prefix))
        if key not in self._columns:
            columns = site.part.columns.cpu()
            weight: Any = site.info.module.weight
            place = Columns.of(columns, len(columns))
            if place.index is None and place == Columns.of(None, int(weight.shape[0])):
                self._columns[key] = None, place
            else:
                index = columns.to(device=self.device, dtype=torch.int32)
                self._columns[key] = index, place if place.index is None else replace(place, index=index)
        return self._columns[key]

    def sites(self, modules: Sequence[Module]) -> Iterator[tuple[int, list[Site]]]:
        """Yield the modules that are on this stage, BaseOp by BaseOp."""
        wanted = {module.path: module for module in modules}
        for op, info in self._ops:
            placed = [(wanted.get(f"{info.hf_prefix}.{path}"), part) for path, part in info.parts.items()]
            sites = [Site(module, info, part) for module, part in placed if module is not None]
            if sites:
                yield op, sites
