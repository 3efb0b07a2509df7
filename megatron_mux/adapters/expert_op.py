"""A BaseOp of routed experts with adapters on it: each expert has a LoRA of its own for each task.

Its rows are pairs of a token and an expert, laid out expert by expert and task by task. So the pairs of an expert and a
task are a group of rows like those of a task elsewhere, with a slot of its own, and the same kernels compute it.

Shapes: P pairs, E experts of the layer, R rank, K and N input and output width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_mux.adapters.adapter import Adapter, AdapterParameter, TaskAdapter
from megatron_mux.adapters.base_op import AttachedBaseOp
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.loop_low_rank import LoopKernels
from megatron_mux.kernels.low_rank import low_rank_linear
from megatron_mux.kernels.terms import Term

if TYPE_CHECKING:
    from megatron_mux.adapters.attach import Site


class ExpertTerms(Adapter):
    """The LoRAs of one task at one BaseOp of routed experts, in the layout of `peft`.

    Every expert-parallel rank has those of all experts, and the gradients of those whose rows it has computed: sums
    over ranks make them whole, wherever experts are. An expert manager has those of its experts only, and steps them
    itself: no gradient of theirs is sent.

    Args:
        owner: The task's adapter.
        site: The parameter that holds the experts.
        down: `[E R, K]`, the A of one expert after the other; E counts the experts that it has here.
        up: `[N, R E]`, B: column `r E + e` is column r of expert e.
    """

    stages = frozenset({"low_rank"})

    def __init__(self, owner: TaskAdapter, site: Site, down: AdapterParameter, up: AdapterParameter) -> None:
        self.owner, self.site, self.down, self.up = owner, site, down, up

    def low_rank(self, slot: int) -> list[Term]:
        """See `Adapter.low_rank`: a term for each expert that this rank holds, with a slot of its own."""
        held, module, spec = self.site.info.experts, self.site.module, self.owner.spec
        rank = spec.rank_of(module)
        # Where the matrices have each one.
        at = held if self.down.index is None else range(len(held))
        if not held:
            return []
        down, down_gradient = (matrix.view(-1, rank, matrix.shape[1]) for matrix in self._matrices(self.down))
        up, up_gradient = (matrix.view(matrix.shape[0], rank, -1) for matrix in self._matrices(self.up))
        return [
            Term(
                slot * len(held) + place,
                down[expert],
                up[:, :, expert],
                spec.scale_of(module),
                down_gradient=down_gradient[expert],
                up_gradient=up_gradient[:, :, expert],
            )
            for place, expert in enumerate(at)
        ]

    def _matrices(self, matrix: AdapterParameter) -> tuple[Tensor, Tensor]:
        """A matrix in the compute dtype, and where its gradient goes."""
        gradient = matrix.value.grad
        assert gradient is not None
        return self.owner.arena.copy_of(matrix), gradient


class AttachedExperts(AttachedBaseOp):
    """The adapters of all tasks at one BaseOp of routed experts; see `AttachedBaseOp`."""

    def attach(self) -> None:
        """Replace the module's `forward`."""
        self.info.module.forward = self.compute

    def renew(self) -> None:
        """Compute with the experts that this rank holds by now, after some have moved."""
        for name, adapter in self._adapters.items():
            assert isinstance(adapter, ExpertTerms)
            self._terms[name] = {"low_rank": adapter.low_rank(adapter.owner.slot)}
        self._change()

    def prepare(self) -> None:
        """Nothing: loops of BLAS calls need no tables on the device."""

    def compute(self, x: Tensor, pairs: Any) -> Tensor:
        """The products of pairs with the matrices of their experts, and with those of their tasks there.

        Args:
            x: `[P, K]`.
            pairs: The pairs, a `backbone.experts.pairs.Pairs`.

        Returns:
            `[P, N]`.
        """
        module: Any = self.info.module
        held, table = len(self.info.experts), self.tables.low_rank
        nothing = torch.empty(0, dtype=torch.int32, device=x.device)
        groups = RowGroups(
            slots=tuple(slot * held + place for place, slot, _, _ in pairs.groups),
            rows=tuple((start, stop) for _, _, start, stop in pairs.groups),
            steps=(0,) * len(pairs.groups),
            training=False,  # which matters for dropout only
            table=nothing,
            tiles=nothing,
            sequence_ids=nothing,
            token_index=nothing,
        )
        if not table.any_of(groups):
            result: Tensor = type(module).forward(module, x, pairs)
            return result
        weight = module.matrices
        return low_rank_linear(x, weight, None, self._anchor, table, groups, LoopKernels, pairs.counts)
