"""A BaseOp of routed experts with adapters on it: each expert has a LoRA of its own for each task.

Its rows are pairs of a token and an expert, laid out expert by expert and task by task. So the pairs of an expert and a
task are a group of rows; kernels compute all groups at once, and find them on the device.

Shapes: P pairs, E experts of the layer, R rank, K and N input and output width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_mux.adapters.adapter import Adapter, TaskAdapter
from megatron_mux.adapters.base_op import AttachedBaseOp
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.kernels.experts.choice import expert_kernels_for
from megatron_mux.kernels.experts.linear import expert_linear
from megatron_mux.kernels.experts.terms import ExpertTable, ExpertTerm

if TYPE_CHECKING:
    from megatron_mux.adapters.host import Site


class ExpertTerms(Adapter):
    """The LoRAs of one task at one BaseOp of routed experts, in the layout of `peft`.

    Every expert-parallel rank has those of all experts, and the gradients of those whose rows it has computed: sums
    over ranks make them whole, wherever experts are. An expert manager has those of its experts only, and steps them
    itself: no gradient of theirs is sent.

    Args:
        site: The parameter that holds the experts.
        down: `[E R, K]`, the A of one expert after the other; E counts the experts that it has here.
        up: `[N, R E]`, B: column `r E + e` is column r of expert e.
    """

    stages = frozenset({"low_rank"})

    def __init__(self, owner: TaskAdapter, site: Site, down: AdapterParameter, up: AdapterParameter) -> None:
        self.owner, self.site, self.down, self.up = owner, site, down, up

    def term(self, slot: int) -> ExpertTerm:
        """What kernels compute of a task with this slot, of the experts that this rank holds."""
        held, module, spec = self.site.info.experts, self.site.module, self.owner.spec
        # Where the matrices have each one.
        at = tuple(held if self.down.index is None else range(len(held)))
        (down, down_gradient), (up, up_gradient) = map(self._matrices, (self.down, self.up))
        rank, scale = spec.rank_of(module), spec.scale_of(module)
        return ExpertTerm(slot, rank, down, up, down_gradient, up_gradient, scale, at)

    def _matrices(self, matrix: AdapterParameter) -> tuple[Tensor, Tensor]:
        """A matrix in the compute dtype, and where its gradient goes."""
        gradient = matrix.value.grad
        assert gradient is not None
        return self.owner.flat_params.copy_of(matrix), gradient


class AttachedExperts(AttachedBaseOp):
    """The adapters of all tasks at one BaseOp of routed experts; see `AttachedBaseOp`."""

    _table: ExpertTable | None = None

    def attach(self) -> None:
        """Replace the module's `forward`."""
        self.info.module.forward = self.compute

    def add(self, task: str, adapter: Adapter, slot: int) -> None:
        """See `AttachedBaseOp.add`."""
        self._adapters[task] = adapter
        self._change()

    def renew(self) -> None:
        """Compute with the experts that this rank holds by now, after some have moved."""
        self._change()

    def _change(self) -> None:
        super()._change()
        self._table = None

    @property
    def table(self) -> ExpertTable:
        """The terms of all tasks."""
        if self._table is None:
            adapters = [adapter for adapter in self._adapters.values() if isinstance(adapter, ExpertTerms)]
            terms = [adapter.term(adapter.owner.slot) for adapter in adapters]
            self._table = ExpertTable(terms, len(self.info.experts), self._anchor.device)
        return self._table

    def prepare(self) -> None:
        """See `AttachedBaseOp.prepare`."""
        self.table.bring()

    def compute(self, x: Tensor, pairs: Any) -> Tensor:
        """The products of pairs with the matrices of their experts, and with those of their tasks there.

        Args:
            x: `[P, K]`.
            pairs: The pairs, a `backbone.experts.permutation.ExpertPermutation`.

        Returns:
            `[P, N]`.
        """
        module: Any = self.info.module
        if not self.table.any_of(pairs.groups):
            result: Tensor = type(module).forward(module, x, pairs)
            return result
        kernels = expert_kernels_for(x, self.kernels)
        return expert_linear(x, module.matrices, self._anchor, self.table, pairs.groups, kernels)
