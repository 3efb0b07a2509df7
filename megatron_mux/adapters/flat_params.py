"""Flat tensors of a task's trained parameters on a rank, with their gradients and copies in the compute dtype.

Parameters are views of one tensor, their gradients views of another, so that sums over ranks, norms, clipping and the
optimizer's update are operations on a few large tensors, whatever an adapter consists of, and micro-batches add to
gradients in place. Optimizers keep their moments in the same order. Each task has flat tensors of its own: tasks come
and go without moving those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_mux.adapters.parameter import AdapterParameter

Kind = TypeVar("Kind")

_ALIGNMENT = 16
"""Every parameter begins at a multiple of so many values: 32 bytes in half precision, as kernels load them."""


class _Rounded(torch.autograd.Function):
    """A parameter's copy that is there already, in the place of the parameter."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = value.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class FlatParams:
    """Flat tensors of a task's trained parameters, whose `value` becomes a view of it, and has its gradient from the
    start.

    Parameters that belong together come first in this order: those this stage owns, those whose gradient tensor ranks
    sum, those that weight decay applies to, those this rank owns. Among equals they keep the given order, next to each
    other where their sizes allow. So gradients that tensor ranks sum are in the same order on all of them.

    Args:
        parameters: With an empty `value` each, and the tensor that it starts from.
        dtype: Of parameters.

    Attributes:
        values: `[n]`; `[n]` `gradients` are in the same order.
        copies: `[n]` the values in the compute dtype; the values themselves if they have it.
        version: Counts changes of the values outside kernels that step many tasks at once.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[AdapterParameter, Tensor]],
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
    ) -> None:
        ordered = sorted(parameters, key=lambda pair: pair[0].precedence)
        self._place: dict[str, tuple[int, int]] = {}
        self._ranges: dict[tuple[tuple[str, bool], ...], list[tuple[int, int]]] = {}
        at = 0
        staged = []
        for record, start in ordered:
            self._place[record.key] = (at, at + start.numel())
            padding = start.new_zeros(-start.numel() % _ALIGNMENT, dtype=dtype)
            staged += [start.flatten().to(dtype), padding]
            at += start.numel() + padding.numel()
        self.values = (torch.cat(staged) if staged else torch.empty(0, dtype=dtype)).to(device)
        self.gradients = torch.zeros_like(self.values)
        same = dtype == compute_dtype
        self.copies = self.values if same else torch.empty_like(self.values, dtype=compute_dtype)
        self._records = [record for record, _ in ordered]
        for record, start in ordered:
            record.value.data = self.of(record, self.values).view(start.shape)
            record.value.grad = self.of(record, self.gradients).view(start.shape)
        self.version = 0
        self.refresh()

    def of(self, record: AdapterParameter, flat: Tensor) -> Tensor:
        """The part of a flat tensor that is a parameter's, `[size]`."""
        first, last = self.place(record)
        return flat[first:last]

    def place(self, record: AdapterParameter) -> tuple[int, int]:
        """First and one past the last value of a parameter."""
        return self._place[record.key]

    def copy_of(self, record: AdapterParameter) -> Tensor:
        """A parameter in the compute dtype, without a gradient: a view of `copies`."""
        return self.of(record, self.copies).view(record.value.shape)

    def rounded(self, record: AdapterParameter) -> Tensor:
        """A parameter in the compute dtype, through which autograd reaches the parameter."""
        if self.copies is self.values:
            return record.value
        rounded: Tensor = _Rounded.apply(record.value, self.copy_of(record))  # type: ignore[no-untyped-call]
        return rounded

    def ranges(self, **wanted: bool) -> list[tuple[int, int]]:
        """First and one past the last value of each run of parameters with these attributes, such as `partial=True`."""
        key = tuple(wanted.items())
        if key not in self._ranges:  # each step asks for the same ones
            runs = self.runs(lambda record: all(getattr(record, name) == value for name, value in key))
            self._ranges[key] = [(first, last) for first, last, is_wanted in runs if is_wanted]
        return self._ranges[key]

    def runs(self, kind: Callable[[AdapterParameter], Kind]) -> list[tuple[int, int, Kind]]:
        """First and one past the last value of each run of neighbouring parameters of one kind, and the kind."""
        runs: list[tuple[int, int, Kind]] = []
        for record in self._records:
            first, last = self._place[record.key]
            last += (first - last) % _ALIGNMENT
            value = kind(record)
            if runs and runs[-1][1:] == (first, value):
                runs[-1] = (runs[-1][0], last, value)
            else:
                runs.append((first, last, value))
        return runs

    def zero(self) -> None:
        """Make all gradients zero."""
        self.gradients.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the values to the compute dtype again: once after each optimizer step."""
        self.version += 1
        if self.copies is not self.values:
            self.copies.copy_(self.values)
