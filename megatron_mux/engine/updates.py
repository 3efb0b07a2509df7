"""The optimizer steps of a bucket's tasks together: their gradients' norms, clipping, and the update.

On a GPU they are three launches for all tasks with AdamW or SGD, whatever their number; other optimizers, and all of
them elsewhere, step one task after the other. A task that skips its step is left out by selection, so its values stay
as they are whatever its gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux import runtime
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.kernels.triton_choice import has_triton, suits_triton
from megatron_mux.kernels.update.table import Piece, UpdateTable, options_of


class BucketUpdate(ABC):
    """Steps the optimizers of a bucket's tasks.

    Args:
        optimizers: Of the tasks, in the bucket's order.
    """

    def __init__(self, optimizers: Sequence[TaskOptimizer]) -> None:
        self.optimizers = tuple(optimizers)

    def prepare(self, first: Sequence[int], count: int) -> None:
        """Bring to the device what the next steps need, before any message is outstanding.

        Args:
            first: For each task, the optimizer step that comes next, from 0.
            count: How many steps will come.
        """

    def expect(self, passes: Sequence[int]) -> None:
        """Note how many backward passes the bucket has in each of the next steps."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """`[tasks]` fp64, this rank's share of the squared norm of each task's gradient: of its own elements."""

    @abstractmethod
    def update(self, first: Sequence[int], later: int, norms: Tensor, skip: Tensor) -> None:
        """Clip gradients, step, round the values to the compute dtype, and make the gradients zero.

        Args:
            first: As in `prepare`.
            later: Which of the steps, from 0.
            norms: `[tasks]` fp64, over all ranks.
            skip: `[tasks]` bool, who skips its step.
        """


MakeUpdate = Callable[[Sequence[TaskOptimizer]], BucketUpdate]
"""Makes the update of tasks, in the bucket's order."""


class LoopUpdate(BucketUpdate):
    """One task after the other."""

    def squared_norms(self) -> Tensor:
        """See `BucketUpdate.squared_norms`."""
        owned = [optimizer.owned for optimizer in self.optimizers]
        together = [gradients for of_task in owned for gradients in of_task]
        norms = iter(torch._foreach_norm(together) if together else ())
        device = self.optimizers[0].flat_params.values.device
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        squares = [[next(norms).double().square() for _ in of_task] for of_task in owned]
        return torch.stack([sum(of_task, start=nothing) for of_task in squares])

    def update(self, first: Sequence[int], later: int, norms: Tensor, skip: Tensor) -> None:
        """See `BucketUpdate.update`."""
        rows = zip(self.optimizers, first, norms, skip.float(), strict=True)
        for optimizer, step, norm, own_skip in rows:
            optimizer.clip(norm)
            optimizer.step(step + later, own_skip)


class GroupedUpdate(BucketUpdate):
    """All tasks at once.

    Args:
        optimizers: As of `BucketUpdate`.
        kernels: Compute it: `update.triton`, or `DryUpdateKernels`.
    """

    def __init__(self, optimizers: Sequence[TaskOptimizer], kernels: Any) -> None:
        super().__init__(optimizers)
        self._kernels = kernels
        pieces = [
            Piece(row, *tensors, copy, decay, rate, counted)
            for row, optimizer in enumerate(self.optimizers)
            for tensors, copy, decay, rate, counted in optimizer.pieces()
        ]
        self._device = self.optimizers[0].flat_params.values.device
        self._table = UpdateTable(pieces, len(self.optimizers)) if pieces else None
        self._options: Tensor | None = None

    def prepare(self, first: Sequence[int], count: int) -> None:
        """See `BucketUpdate.prepare`."""
        rows = [
            [options_of(*o.options(step + later)) for o, step in zip(self.optimizers, first, strict=True)]
            for later in range(count)
        ]
        self._options = runtime.to_device(torch.tensor(rows, dtype=torch.float64), self._device)

    def squared_norms(self) -> Tensor:
        """See `BucketUpdate.squared_norms`."""
        if self._table is None:
            return torch.zeros(len(self.optimizers), dtype=torch.float64, device=self._device)
        norms: Tensor = self._kernels.squared_norms(self._table)
        return norms

    def update(self, first: Sequence[int], later: int, norms: Tensor, skip: Tensor) -> None:
        """See `BucketUpdate.update`."""
        assert self._options is not None
        if self._table is not None:
            self._kernels.update_(self._table, self._options[later], norms, skip)


class DryUpdateKernels:
    """Allocates on a fake GPU what `update.triton` allocates on a real one; nothing is computed."""

    @staticmethod
    def squared_norms(table: UpdateTable) -> Tensor:
        """See `update.triton.squared_norms`."""
        return torch.empty(table.rows, dtype=torch.float64, device=table.entries.device)

    @staticmethod
    def update_(table: UpdateTable, options: Tensor, norms: Tensor, skip: Tensor) -> None:
        """See `update.triton.update_`."""


class MixedUpdate(BucketUpdate):
    """Tasks whose optimizer kernels compute at once, then the others one after the other.

    Args:
        optimizers: As of `BucketUpdate`; some of either kind.
        make: Makes the update of the former.
    """

    def __init__(self, optimizers: Sequence[TaskOptimizer], make: MakeUpdate) -> None:
        super().__init__(optimizers)
        device = self.optimizers[0].flat_params.values.device
        self._parts: list[tuple[BucketUpdate, list[int], Tensor]] = []
        for fused, made in ((True, make), (False, LoopUpdate)):
            rows = [row for row, optimizer in enumerate(self.optimizers) if optimizer.is_fused == fused]
            update = made([self.optimizers[row] for row in rows])
            self._parts.append((update, rows, runtime.to_device(torch.tensor(rows), device)))

    def prepare(self, first: Sequence[int], count: int) -> None:
        """See `BucketUpdate.prepare`."""
        for update, rows, _ in self._parts:
            update.prepare([first[row] for row in rows], count)

    def squared_norms(self) -> Tensor:
        """See `BucketUpdate.squared_norms`."""
        device = self.optimizers[0].flat_params.values.device
        norms = torch.empty(len(self.optimizers), dtype=torch.float64, device=device)
        for update, _, places in self._parts:
            norms[places] = update.squared_norms()
        return norms

    def update(self, first: Sequence[int], later: int, norms: Tensor, skip: Tensor) -> None:
        """See `BucketUpdate.update`."""
        for update, rows, places in self._parts:
            update.update([first[row] for row in rows], later, norms[places], skip[places])


def update_of(optimizers: Sequence[TaskOptimizer]) -> BucketUpdate:
    """The update of tasks: at once where Triton kernels compute it."""
    values = optimizers[0].flat_params.values
    if not suits_triton(values.device, values.dtype):
        return LoopUpdate(optimizers)
    if isinstance(values, FakeTensor):
        kernels: Any = DryUpdateKernels
    elif has_triton():
        from megatron_mux.kernels.update import triton as kernels
    else:
        return LoopUpdate(optimizers)

    def grouped(optimizers: Sequence[TaskOptimizer]) -> BucketUpdate:
        return GroupedUpdate(optimizers, kernels)

    fused = [optimizer.is_fused for optimizer in optimizers]
    if all(fused):
        return grouped(optimizers)
    return MixedUpdate(optimizers, grouped) if any(fused) else LoopUpdate(optimizers)
