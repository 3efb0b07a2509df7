"""A matrix held as codes and statistics: what all quantised formats have in common.

Shapes: N rows (output features), K columns (input features).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.errors import UserError
from megatron_mux.kernels.dequantise.choice import kernels_for
from megatron_mux.kernels.dequantise.interface import DequantiseKernels

VALUES_AT_ONCE = 1 << 22
"""Values that are dequantised at once where there is no kernel: bounds temporary memory."""


class QuantisedMatrix(ABC):
    """A matrix `[N, K]` in few bits.

    Args:
        rowwise: Tensors `[N, width]` in which a row belongs to a row of the matrix: its codes, its scales.
        shared: Tensors that all rows need.
        columns: K.
        rounded_to: The dtype to which dequantised values are rounded before they become the backbone's; None: none.
    """

    unit: ClassVar[int] = 1
    """Tensor ranks divide columns at multiples of this."""

    def __init__(
        self,
        rowwise: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        columns: int,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        self.rowwise, self.shared = dict(rowwise), dict(shared)
        self.columns, self.rounded_to = columns, rounded_to

    @property
    def rows(self) -> int:
        """N."""
        return next(iter(self.rowwise.values())).shape[0]

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that is held, in a fixed order."""
        return [*self.rowwise.values(), *self.shared.values()]

    @tensors.setter
    def tensors(self, moved: Sequence[Tensor]) -> None:
        keys = [(where, name) for where in (self.rowwise, self.shared) for name in where]
        for (where, name), tensor in zip(keys, moved, strict=True):
            where[name] = tensor

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is held."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def on(self, device: torch.device) -> Self:
        """The same matrix on a device."""
        return self._with(
            {name: tensor.to(device) for name, tensor in self.rowwise.items()},
            {name: tensor.to(device) for name, tensor in self.shared.items()},
            self.columns,
        )

    def take(self, rows: Tensor) -> Self:
        """Some of the rows, in the order given."""
        rows = rows.to(self.tensors[0].device)
        taken = {name: tensor.index_select(0, rows) for name, tensor in self.rowwise.items()}
        return self._with(taken, self.shared, self.columns)

    def cut(self, columns: range) -> Self:
        """Some neighbouring columns.

        Raises:
            UserError: They do not begin and end between blocks of values that share a scale.
        """
        if len(columns) == self.columns:
            return self
        block = self.block
        if columns.start % block or columns.stop % block:
            raise UserError(
                f"A tensor-parallel rank's {len(columns)} of {self.columns} input features do not begin and end at "
                f"multiples of {block}, the values that share a scale in the quantised backbone: use fewer of them."
            )
        return self._with(self._cut(columns), self.shared, len(columns))

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values, `[N, K]`."""
        place = torch.empty(self.rows, self.columns, dtype=dtype, device=self.tensors[0].device)
        self.dequantise_into(place)
        return place

    def dequantise_into(self, place: Tensor, counts: Tensor | None = None) -> None:
        """Write the values to a contiguous `[N, K]` tensor on the same device: on a GPU by one launch.

        Args:
            counts: `[experts]` integers on that device, of a matrix that has the rows of several experts, one after
                the other: an expert with zero is left out. On a GPU the host does not read them. None: all rows.
        """
        kernels = kernels_for(place)
        if kernels is not None:
            self._launch(kernels, place, counts)
            return
        for part in self._row_ranges(counts):
            for chunk in row_chunks(len(part), self.columns):
                rows = slice(part.start + chunk.start, part.start + chunk.stop)
                self._loop(rows, place[rows])

    def _row_ranges(self, counts: Tensor | None) -> list[range]:
        """The rows to dequantise."""
        if counts is None or isinstance(counts, FakeTensor):
            return [range(self.rows)]
        each = self.rows // len(counts)
        chosen = [expert for expert, count in enumerate(counts.tolist()) if count]
        return [range(expert * each, (expert + 1) * each) for expert in chosen]

    def _loop(self, rows: slice, target: Tensor) -> None:
        """Write the values of some rows."""
        if target.dtype == torch.float32 and self.rounded_to in (None, torch.float32):
            self._fill(rows, target)
            return
        values = torch.empty_like(target, dtype=torch.float32)
        self._fill(rows, values)
        target.copy_(values if self.rounded_to is None else values.to(self.rounded_to))

    @property
    @abstractmethod
    def block(self) -> int:
        """Neighbouring values of a row that share a scale."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Put matrices of equal width on top of each other."""

    @abstractmethod
    def _cut(self, columns: range) -> dict[str, Tensor]:
        """The row-wise tensors of some columns."""

    @abstractmethod
    def _fill(self, rows: slice, values: Tensor) -> None:
        """Write the values of some rows to a contiguous fp32 tensor."""

    @abstractmethod
    def _launch(self, kernels: type[DequantiseKernels], place: Tensor, counts: Tensor | None) -> None:
        """Write all values by a kernel; see `dequantise_into`."""

    def _with(self, rowwise: Mapping[str, Tensor], shared: Mapping[str, Tensor], columns: int) -> Self:
        return type(self)(rowwise, shared, columns, self.rounded_to)


def row_chunks(rows: int, columns: int) -> Iterator[range]:
    """Ranges of rows of about `VALUES_AT_ONCE` values."""
    step = max(1, VALUES_AT_ONCE // max(1, columns))
    for start in range(0, rows, step):
        yield range(start, min(start + step, rows))
