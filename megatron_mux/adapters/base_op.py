"""A BaseOp with adapters on it: Dispatch of rows to adapters, one product for all tasks, Aggregate of the results.

MuxTune section 3.2 and figure 7(b). `AttachedBaseOp.forward` takes the place of the Megatron module's `forward` while
some task has an adapter there; module, parameters and names stay as they are, and detaching restores the module.

Under tensor parallelism the input of a column-parallel BaseOp is copied (or, with sequence parallelism, gathered)
once, so the gradients of BaseOp and adapters share one reduction; a row-parallel BaseOp's adapters add to the
partial output before its reduction. No adapter brings a collective of its own.

Shapes: T rows of the micro-batch, K and N input and output width on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux import layout
from megatron_mux.adapters.adapter import Adapter
from megatron_mux.base_ops import BaseOpInfo
from megatron_mux.kernels.low_rank import low_rank_linear
from megatron_mux.kernels.low_rank_choice import KernelName, kernels_for
from megatron_mux.kernels.terms import Term, TermTable
from megatron_mux.layout import MicroBatch

if TYPE_CHECKING:
    from megatron_mux.adapters.attach import Host

Rows = tuple[int, int]
RowFunction = Callable[[Tensor], Tensor]


class AttachedBaseOp:
    """The adapters of all tasks at one BaseOp.

    Args:
        info: The BaseOp.
        host: The stage that it belongs to.

    Attributes:
        kernels: Compute low-rank terms; None: the default ones.
    """

    def __init__(self, info: BaseOpInfo, host: Host) -> None:
        self.info = info
        self.parallel = host.parallel
        self._anchor = host.anchor
        # Nothing that a micro-batch does here takes longer for more tasks with low-rank terms: their table is made
        # anew after they come or go, and `others` are those that do something else.
        self._table: TermTable | None = TermTable(())
        self.others: dict[str, Adapter] = {}
        self._low_rank: dict[str, Sequence[Term]] = {}
        self.kernels: KernelName | None = None

    def attach(self) -> None:
        """Replace the module's `forward`. A row-parallel one gets `finish`, too."""
        self.info.module.forward = self.forward
        if not self.info.column_parallel:
            setattr(self.info.module, "finish", self.finish)  # noqa: B010 (on the instance)

    def add(self, task: str, adapter: Adapter, slot: int) -> None:
        """Give the rows of `task`, which has this slot, to `adapter`."""
        if "low_rank" in adapter.stages:
            self._low_rank[task] = adapter.low_rank(slot)
            self._table = None
        if adapter.stages - {"low_rank"}:
            self.others[task] = adapter

    def remove(self, task: str) -> None:
        """Undo `add`. Removing the last adapter restores the module."""
        self.others.pop(task, None)
        if self._low_rank.pop(task, None) is not None:
            self._table = None
        if not self.others and not self._low_rank:
            # The class's own method shows again: nothing of ours is left in the module's __dict__.
            del self.info.module.forward
            vars(self.info.module).pop("finish", None)

    @property
    def table(self) -> TermTable:
        """The low-rank terms of all tasks."""
        if self._table is None:
            self._table = TermTable([term for terms in self._low_rank.values() for term in terms])
        return self._table

    def prepare(self) -> None:
        """Bring to a GPU what its kernels need of tasks that have come or gone."""
        self.table.bring()

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute what Megatron's linear modules do, with adapters: `[T, 1, K]` to `[T, 1, N]`, and a skipped bias."""
        batch = layout.active()
        present = self._present(batch) if self.others else {}
        fused = self.table.any_of(batch.groups)
        if not fused and not any(adapter.stages - {"extend"} for adapter in present.values()):
            module = self.info.module
            result: tuple[Tensor, Tensor | None] = type(module).forward(module, input_, *args, **kwargs)
            return result
        # What Megatron's module can be told besides (another weight, gathering) the layers of a GPT model never use.
        assert not args and not kwargs, (
            f"{self.info.name}: arguments besides the input are not supported with adapters"
        )
        if self.info.column_parallel:
            return self._column(input_, present, batch)
        return self._row(input_, present, batch)

    def _present(self, batch: MicroBatch) -> dict[Rows, Adapter]:
        """Adapters other than low-rank ones, by their rows; those that extend the batch have done so."""
        rows = batch.task_rows
        present = {rows[task]: adapter for task, adapter in self.others.items() if task in rows}
        present = {own: present[own] for own in sorted(present) if own[0] < own[1]}
        for adapter in present.values():
            if "extend" in adapter.stages:
                adapter.extend(batch)
        return present

    def _column(
        self, input_: Tensor, present: Mapping[Rows, Adapter], batch: MicroBatch
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self.info.module
        x3 = self._spread(input_)
        x = x3.reshape(-1, x3.shape[-1])
        skip = module.skip_bias_add
        y = self._product(x, None if skip else module.bias, present, batch)
        bias = module.bias if skip else None
        y, bias = _finish(y, bias, present)
        return y.view(*x3.shape[:-1], y.shape[-1]), bias

    def _row(
        self, input_: Tensor, present: Mapping[Rows, Adapter], batch: MicroBatch
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self.info.module
        x = input_.reshape(-1, input_.shape[-1])
        x = _map_rows(x, {rows: a.before for rows, a in present.items() if "before" in a.stages})
        y3 = self._product(x, None, present, batch).view(*input_.shape[:-1], -1)
        if module.explicit_expert_comm:
            return y3, None  # the caller sums it, and calls `finish`
        return self.finish(self._reduce(y3))

    def finish(self, summed: Tensor) -> tuple[Tensor, Tensor | None]:
        """What a row-parallel BaseOp does after its sum over tensor ranks: adapters that act there, and the bias.

        Args:
            summed: `[T, 1, N]`; with sequence parallelism this rank's rows of it.

        Returns:
            Likewise, and the bias if the module skips it.
        """
        module: Any = self.info.module
        batch = layout.active()
        present = self._present(batch) if self.others else {}
        y, bias = summed.view(-1, summed.shape[-1]), module.bias
        if bias is not None and not module.skip_bias_add:
            y, bias = y + bias, None
        trained = any("after" in adapter.stages for adapter in present.values())
        if self.parallel.sequence_parallel:
            present = _within(present, self.parallel.tp_rank * y.shape[0], y.shape[0])
        y, bias = _finish(y, bias, present)
        if trained and torch.is_grad_enabled() and not y.requires_grad:
            # The rows in question are another rank's; what follows has collectives in its backward, for all ranks.
            y = y.detach().requires_grad_()
        return y.view(*summed.shape), bias

    def _product(
        self, x: Tensor, bias: Tensor | None, present: Mapping[Rows, Adapter], batch: MicroBatch
    ) -> Tensor:
        """Compute the frozen product with the terms of all adapters: fused low-rank ones, then the others."""
        weight: Tensor = self.info.module.weight  # type: ignore[assignment]
        if self.table.any_of(batch.groups):
            kernels = kernels_for(x, self.kernels)
            y = low_rank_linear(x, weight, bias, self._anchor, self.table, batch.groups, kernels)
        else:
            y = F.linear(x, weight, bias)
        others = {rows: a for rows, a in present.items() if "product" in a.stages}
        if not others:
            return y
        own = dict(zip(others, _split_rows(x, list(others)), strict=True))

        def dispatch(rows: Rows, adapter: Adapter) -> RowFunction:
            return lambda piece: adapter.product(own[rows], piece, batch)

        return _map_rows(y, {rows: dispatch(rows, a) for rows, a in others.items()})

    def _spread(self, input_: Tensor) -> Tensor:
        """Copy or gather the input of a column-parallel product; the backward sums its gradient over tensor ranks."""
        if self.parallel.tp_size == 1 or self.info.module.explicit_expert_comm:
            return input_
        from megatron.core.tensor_parallel import mappings

        group = self.parallel.tp_group
        if self.parallel.sequence_parallel:
            gathered: Tensor = mappings.gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=True, group=group
            )
            return gathered
        copied: Tensor = mappings.copy_to_tensor_model_parallel_region(input_, group=group)
        return copied

    def _reduce(self, partial: Tensor) -> Tensor:
        """Sum the row-parallel product over tensor ranks; with sequence parallelism, keep this rank's rows of it."""
        if self.parallel.tp_size == 1:
            return partial
        from megatron.core.tensor_parallel import mappings

        group = self.parallel.tp_group
        reduce = (
            mappings.reduce_scatter_to_sequence_parallel_region
            if self.parallel.sequence_parallel
            else mappings.reduce_from_tensor_model_parallel_region
        )
        whole: Tensor = reduce(partial, group=group)
        return whole


def _finish(y: Tensor, bias: Tensor | None, present: Mapping[Rows, Adapter]) -> tuple[Tensor, Tensor | None]:
    """Apply `Adapter.after`. The bias is added first, even where Megatron would add it later."""
    after = {rows: adapter.after for rows, adapter in present.items() if "after" in adapter.stages}
    if not after:
        return y, bias
    if bias is not None:
        # The caller adds what is returned as bias: adding zero changes nothing, and its fused kernels want one.
        y, bias = y + bias, torch.zeros_like(bias)
    return _map_rows(y, after), bias


def _within(present: Mapping[Rows, Adapter], start: int, count: int) -> dict[Rows, Adapter]:
    """Cut row ranges to the `count` rows from `start`, counted from there; empty ranges are dropped."""
    cut = {(max(a - start, 0), min(b - start, count)): adapter for (a, b), adapter in present.items()}
    return {(a, b): adapter for (a, b), adapter in cut.items() if a < b}


def _split_rows(x: Tensor, rows: list[Rows]) -> list[Tensor]:
    """Take the rows of each range, in one split: autograd then assembles the gradient in one copy."""
    pieces = x.split(_lengths(rows, x.shape[0]))
    return list(pieces[1::2])


def _map_rows(x: Tensor, functions: Mapping[Rows, RowFunction]) -> Tensor:
    """Replace each range of rows by its function of them; other rows stay as they are."""
    if not functions:
        return x
    rows = sorted(functions)
    pieces = list(x.split(_lengths(rows, x.shape[0])))
    for i, span in enumerate(rows):
        pieces[2 * i + 1] = functions[span](pieces[2 * i + 1])
    kept = [piece for piece in pieces if piece.shape[0]]
    return kept[0] if len(kept) == 1 else torch.cat(kept)


def _lengths(rows: list[Rows], total: int) -> list[int]:
    """Lengths of gap, range, gap, range, ..., gap."""
    lengths, at = [], 0
    for start, stop in rows:
        lengths += [start - at, stop - start]
        at = stop
    return [*lengths, total - at]
