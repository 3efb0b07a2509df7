"""A BaseOp with adapters on it: Dispatch of rows to adapters, one product for all tasks, Aggregate of the results.

MuxTune section 3.2 and figure 7(b). `AttachedBaseOp.forward` takes the place of the Megatron module's `forward` while
some task has an adapter there; module, parameters and names stay as they are, and detaching restores the module.

Under tensor parallelism the input of a column-parallel BaseOp is copied (or, with sequence parallelism, gathered)
once, so the gradients of BaseOp and adapters share one reduction; a row-parallel BaseOp's adapters add to the
partial output before its reduction. No adapter brings a collective of its own.

Shapes: T rows of the micro-batch, K and N input and output width on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.adapters.adapter import Adapter, Grouped
from megatron_mux.base_ops import BaseOpInfo
from megatron_mux.batch.packed_batch import PackedBatch, active
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.low_rank.choice import KernelName, kernels_for
from megatron_mux.kernels.low_rank.grouped_rows import GroupedKernels, RowTables, adapt_rows
from megatron_mux.kernels.low_rank.product import low_rank_linear
from megatron_mux.kernels.low_rank.reference import LoopKernels
from megatron_mux.kernels.low_rank.terms import Term, TermTable
from megatron_mux.megatron_core import gather_input

if TYPE_CHECKING:
    from megatron_mux.adapters.host import Host

Rows = tuple[int, int]
RowFunction = Callable[[Tensor], Tensor]
Present = dict[Rows, tuple[Adapter, frozenset[str]]]
"""Rows of adapters that compute task by task, each with the stages that do."""


class AttachedBaseOp:
    """The adapters of all tasks at one BaseOp.

    Args:
        host: The stage that it belongs to.

    Attributes:
        kernels: Which compute low-rank terms; None: the default ones.
    """

    def __init__(self, info: BaseOpInfo, host: Host) -> None:
        self.info = info
        self.parallel = host.parallel
        self._anchor = host.anchor
        # Nothing that a micro-batch does here takes longer for more tasks whose terms are in tables. These are made
        # anew after tasks come or go.
        self._adapters: dict[str, Adapter] = {}
        self._terms: dict[str, Mapping[str, Sequence[Term]]] = {}
        self._tables: Tables | None = None
        self._others: dict[frozenset[str], dict[str, tuple[Adapter, frozenset[str]]]] = {}
        self._kernels: KernelName | None = None

    @property
    def kernels(self) -> KernelName | None:  # noqa: D102 (see the class)
        return self._kernels

    @kernels.setter
    def kernels(self, name: KernelName | None) -> None:
        self._kernels = name
        self._change()

    def attach(self) -> None:
        """Replace the module's `forward`. A row-parallel one gets `finish`, too."""
        self.info.module.forward = self.forward
        if not self.info.column_parallel:
            setattr(self.info.module, "finish", self.finish)  # noqa: B010 (on the instance)

    def add(self, task: str, adapter: Adapter, slot: int) -> None:
        """Give the rows of `task`, which has this slot, to `adapter`."""
        self._adapters[task] = adapter
        terms: dict[str, Sequence[Term]] = {
            stage: adapter.row_terms(stage, slot) for stage in adapter.grouped & adapter.stages
        }
        if "low_rank" in adapter.stages:
            terms["low_rank"] = adapter.low_rank(slot)
        self._terms[task] = terms
        self._change()

    def remove(self, task: str) -> None:
        """Undo `add`. Removing the last adapter restores the module."""
        self._adapters.pop(task, None)
        self._terms.pop(task, None)
        self._change()
        if not self._adapters:
            # The class's own method shows again: nothing of ours is left in the module's __dict__.
            del self.info.module.forward
            vars(self.info.module).pop("finish", None)

    def _change(self) -> None:
        self._tables = None
        self._others.clear()

    @property
    def tables(self) -> Tables:
        """The terms of all tasks."""
        if self._tables is None:
            # Which rows of a micro-batch are a task's: behind a row-parallel BaseOp, tensor ranks divide them.
            divided = self.parallel.sequence_parallel and not self.info.column_parallel
            self._tables = Tables(self._terms.values(), self._kernels, divided)
        return self._tables

    def prepare(self) -> None:
        """Bring to a GPU what its kernels need of tasks that have come or gone."""
        self.tables.bring()

    def others(self, grouped: frozenset[Grouped]) -> dict[str, tuple[Adapter, frozenset[str]]]:
        """Tasks that compute by themselves, with the stages that do, if tables serve the stages in `grouped`."""
        if grouped not in self._others:
            left = {
                task: (adapter, adapter.stages - {"low_rank"} - (adapter.grouped & grouped))
                for task, adapter in self._adapters.items()
            }
            self._others[grouped] = {task: stages for task, stages in left.items() if stages[1]}
        return self._others[grouped]

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute what Megatron's linear modules do, with adapters: `[T, 1, K]` to `[T, 1, N]`, and a skipped bias."""
        batch = active()
        grouped = self.tables.grouped
        present = self._present(batch, grouped)
        alone = bool(present) and any(stages - {"extend"} for _, stages in present.values())
        if not alone and not self.tables.any_of(batch.groups, grouped):
            module = self.info.module
            result: tuple[Tensor, Tensor | None] = type(module).forward(module, input_, *args, **kwargs)
            return result
        # What Megatron's module can be told besides (another weight, gathering) the layers of a GPT model never use.
        assert not args and not kwargs, (
            f"{self.info.name}: arguments besides the input are not supported with adapters"
        )
        if self.info.column_parallel:
            return self._column(input_, present, batch, grouped)
        return self._row(input_, present, batch, grouped)

    def _present(self, batch: PackedBatch, grouped: frozenset[Grouped]) -> Present:
        """Adapters with stages that are computed task by task; those that extend the batch have done so."""
        others = self.others(grouped)
        if not others:
            return {}
        rows = batch.task_rows
        present = {rows[task]: stages for task, stages in others.items() if task in rows}
        present = {span: present[span] for span in sorted(present) if span[0] < span[1]}
        for adapter, stages in present.values():
            if "extend" in stages:
                adapter.extend(batch)
        return present

    def _column(
        self, input_: Tensor, present: Present, batch: PackedBatch, grouped: frozenset[Grouped]
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self.info.module
        x3 = self._gather_input(input_)
        x = x3.reshape(-1, x3.shape[-1])
        skip = module.skip_bias_add
        y = self._product(x, None if skip else module.bias, present, batch)
        bias = module.bias if skip else None
        y, bias = self._finish(y, bias, present, batch, grouped)
        return y.view(*x3.shape[:-1], y.shape[-1]), bias

    def _row(
        self, input_: Tensor, present: Present, batch: PackedBatch, grouped: frozenset[Grouped]
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self.info.module
        x = input_.reshape(-1, input_.shape[-1])
        if present:
            x = _map_rows(x, {rows: a.before for rows, a in _of_stage(present, "before")})
        if "before" in grouped:
            x = self._adapted(x, self.tables.before, batch)
        y3 = self._product(x, None, present, batch).view(*input_.shape[:-1], -1)
        if module.explicit_expert_comm:
            return y3, None  # the caller sums it, and calls `finish`
        return self._behind(self._reduce_output(y3), present, batch, grouped)

    def finish(self, summed: Tensor) -> tuple[Tensor, Tensor | None]:
        """What a row-parallel BaseOp does after its sum over tensor ranks: adapters that act there, and the bias.

        Args:
            summed: `[T, 1, N]`; with sequence parallelism this rank's rows of it.

        Returns:
            Likewise, and the bias if the module skips it.
        """
        batch, grouped = active(), self.tables.grouped
        return self._behind(summed, self._present(batch, grouped), batch, grouped)

    def _behind(
        self, summed: Tensor, present: Present, batch: PackedBatch, grouped: frozenset[Grouped]
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self.info.module
        y, bias = summed.view(-1, summed.shape[-1]), module.bias
        if bias is not None and not module.skip_bias_add:
            y, bias = y + bias, None
        trained = any(_of_stage(present, "after"))
        if self.parallel.sequence_parallel:
            present = _within(present, self.parallel.tp_rank * y.shape[0], y.shape[0])
        y, bias = self._finish(y, bias, present, batch, grouped)
        if trained and torch.is_grad_enabled() and not y.requires_grad:
            # The rows in question are another rank's; what follows has collectives in its backward, for all ranks.
            y = y.detach().requires_grad_()
        return y.view(*summed.shape), bias

    def _product(self, x: Tensor, bias: Tensor | None, present: Present, batch: PackedBatch) -> Tensor:
        """Compute the frozen product with the terms of all adapters: fused low-rank ones, then the others."""
        weight: Tensor = self.info.module.weight  # type: ignore[assignment]
        tables = self.tables
        if tables.low_rank.any_of(batch.groups):
            y = low_rank_linear(x, weight, bias, self._anchor, tables.low_rank, batch.groups, tables.kernels)
        else:
            y = F.linear(x, weight, bias)
        others = dict(_of_stage(present, "product")) if present else {}
        if not others:
            return y
        inputs = dict(zip(others, _split_rows(x, list(others)), strict=True))

        def dispatch(rows: Rows, adapter: Adapter) -> RowFunction:
            return lambda piece: adapter.product(inputs[rows], piece, batch)

        return _map_rows(y, {rows: dispatch(rows, a) for rows, a in others.items()})

    def _finish(
        self,
        y: Tensor,
        bias: Tensor | None,
        present: Present,
        batch: PackedBatch,
        grouped: frozenset[Grouped],
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the stage `after`. The bias is added first, even where Megatron would add it later."""
        together = "after" in grouped and self.tables.after.any_of(batch.groups)
        if not present and not together:
            return y, bias
        after = {rows: adapter.after for rows, adapter in _of_stage(present, "after")}
        if not after and not together:
            return y, bias
        if bias is not None:
            # The caller adds what is returned as bias: adding zero changes nothing, and its fused kernels want one.
            y, bias = y + bias, torch.zeros_like(bias)
        if together:
            y = self._adapted(y, self.tables.after, batch)
        return _map_rows(y, after), bias

    def _adapted(self, values: Tensor, tables: RowTables, batch: PackedBatch) -> Tensor:
        """The rows with the terms of all tasks."""
        kernels = self.tables.row_kernels
        if kernels is None or not tables.any_of(batch.groups):
            return values
        return adapt_rows(values, self._anchor, tables, batch.groups, kernels)

    def _gather_input(self, input_: Tensor) -> Tensor:
        """Copy or gather the input of a column-parallel product; the backward sums its gradient over tensor ranks."""
        if self.parallel.tp_size == 1 or self.info.module.explicit_expert_comm:
            return input_
        return gather_input(input_, self.parallel.tp_group, self.parallel.sequence_parallel)

    def _reduce_output(self, partial: Tensor) -> Tensor:
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


class Tables:
    """The terms of all tasks at a BaseOp, and the kernels that compute them.

    Args:
        terms: Those of each task, by stage.
        chosen: Which kernels compute those of the product; None: the default ones.
        divided: Whether tensor ranks divide the rows of the output.

    Attributes:
        low_rank: Terms of the product.
        before: Terms of the input.
        after: Terms of the output.
        kernels: Compute those of the product.
        row_kernels: Compute the others, for all tasks at once; None: nothing does.
        grouped: The stages that `row_kernels` compute, whichever kernels are chosen for the product.
    """

    def __init__(
        self, terms: Collection[Mapping[str, Sequence[Term]]], chosen: KernelName | None, divided: bool
    ) -> None:
        def of(stage: str) -> list[Term]:
            return [term for by_stage in terms for term in by_stage.get(stage, ())]

        low_rank, before, after = of("low_rank"), of("before"), of("after")
        self.low_rank = TermTable(low_rank)
        self.before, self.after = RowTables.of(before), RowTables.of(after)
        # Terms are where rows are, and kernels take or leave both of their dtypes alike.
        self.kernels = kernels_for(low_rank[0].down, chosen) if low_rank else LoopKernels
        of_rows = kernels_for((before or after)[0].down) if before or after else LoopKernels
        self.row_kernels = of_rows if issubclass(of_rows, GroupedKernels) else None
        stages: tuple[Grouped, ...] = ("before",) if divided else ("before", "after")
        self.grouped: frozenset[Grouped] = frozenset(stages if self.row_kernels else ())

    def any_of(self, groups: RowGroups, grouped: frozenset[Grouped]) -> bool:
        """Whether some task with rows in a micro-batch has terms: low-rank ones, or of the stages in `grouped`."""
        return (
            self.low_rank.any_of(groups)
            or ("before" in grouped and self.before.any_of(groups))
            or ("after" in grouped and self.after.any_of(groups))
        )

    def bring(self) -> None:
        """Copy the tables to the device, unless they are there."""
        for table in (self.low_rank, *self.before, *self.after):
            table.bring()


def _of_stage(present: Present, stage: str) -> Iterator[tuple[Rows, Adapter]]:
    """Rows and adapters that compute a stage task by task."""
    return ((rows, adapter) for rows, (adapter, stages) in present.items() if stage in stages)


def _within(present: Present, start: int, count: int) -> Present:
    """Cut row ranges to the `count` rows from `start`, counted from there; empty ranges are dropped."""
    cut = {(max(a - start, 0), min(b - start, count)): of_rows for (a, b), of_rows in present.items()}
    return {(a, b): of_rows for (a, b), of_rows in cut.items() if a < b}


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
