"""Gradients of rows that stand for both the embedding and the output layer, summed over both ends of a pipeline.

The two stages hold a copy each and must take the same steps. Their gradients travel as further columns of the tables
that buckets send anyway: from the last stage to the first, which adds its own and counts their norm, and back as the
sum. The rows are few (`trainable_token_indices`).
Shapes: K tasks of a bucket, C columns: values of the largest such rows of any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.runtime import Parallel


class TiedRows:
    """The columns of buckets' tables for such rows.

    Args:
        adapters: Of the tasks, by name.
        parallel: Where this rank stands; without a pipeline there is nothing to sum.
    """

    def __init__(self, adapters: Mapping[str, TaskAdapter], parallel: Parallel) -> None:
        self._adapters = adapters
        sizes = {
            name: sum(math.prod(matrix.size(adapter.host.shape)) for matrix, _ in adapter.rows.tied)
            for name, adapter in adapters.items()
            if parallel.pp_size > 1
        }
        self._values = {name: size for name, size in sizes.items() if size}

    def width(self, names: Sequence[str]) -> int:
        """C of these tasks."""
        return max((self._values.get(name, 0) for name in names), default=0)

    def send(self, names: Sequence[str], device: torch.device) -> Tensor:
        """`[K, C]` fp64, the last stage's gradients."""
        columns = torch.zeros(len(names), self.width(names), dtype=torch.float64, device=device)
        for name, row in self._rows(names, columns):
            row.copy_(torch.cat([gradient.flatten() for gradient in self._gradients(name)]))
        return columns

    def add(self, names: Sequence[str], columns: Tensor) -> None:
        """Add the last stage's gradients to the first stage's; `columns` becomes the sum."""
        for name, row in self._rows(names, columns):
            for gradient, part in self._parts(name, row):
                gradient.add_(part)
                part.copy_(gradient)

    def receive(self, names: Sequence[str], columns: Tensor) -> None:
        """Replace the last stage's gradients by the sum."""
        for name, row in self._rows(names, columns):
            for gradient, part in self._parts(name, row):
                gradient.copy_(part)

    def _rows(self, names: Sequence[str], columns: Tensor) -> list[tuple[str, Tensor]]:
        if not self._values:
            return []
        rows = zip(names, columns, strict=True)
        return [(name, row[: self._values[name]]) for name, row in rows if name in self._values]

    def _parts(self, name: str, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        gradients = self._gradients(name)
        parts = row.split([gradient.numel() for gradient in gradients])
        return [(g, part.view_as(g)) for g, part in zip(gradients, parts, strict=True)]

    def _gradients(self, name: str) -> list[Tensor]:
        found = []
        for _, parameter in self._adapters[name].rows.tied:
            assert parameter is not None and parameter.value.grad is not None
            found.append(parameter.value.grad)
        return found
