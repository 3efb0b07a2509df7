"""Diff pruning (Guo et al., 2021): a sparse difference to a frozen weight, `y += x (z * d)^T`.

`d` and the logits of the mask `z` are trained together. While the mask is relaxed, `z` is a stretched binary concrete
variable cut to [0, 1] (Louizos et al., 2018), drawn anew each step from a hash of (task seed, step, module, element),
so that neither packing nor ranks change it; the expected number of non-zeros costs `l0_weight` each. Evaluation takes
the noise-free mask. After two thirds of the task's steps the mask is frozen: in each module the share of entries with
the largest |z * d| that `sparsity` leaves keeps its value, all others become zero for good, and the rest of the
training fine-tunes what is kept.

Stored per module: `diff.weight` and `diff.log_alpha`, `[out, in]`. The difference they stand for is always
`diff.weight * clamp(3 * sigmoid(diff.log_alpha) - 1.5, 0, 1)`; once frozen, `diff.weight` alone is that difference.
Both are divided over tensor ranks as the weight is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mux.adapters.adapter import Adapter, TaskAdapter
from megatron_mux.adapters.costs import BaseOpWidths, Curve, Work
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.kind import AdapterSpec, Sample
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.peft_fields import OUR_FIELDS
from megatron_mux.adapters.targets import short_names
from megatron_mux.adapters.tensors import AdapterTensor, constant
from megatron_mux.base_ops import BaseOpName
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.errors import UserError
from megatron_mux.kernels.dropout import key_of, uniform
from megatron_mux.section import Number, Targets
from megatron_mux.shape import BackboneShape, Module

STRETCH = (-1.5, 1.5)
INITIAL_LOG_ALPHA = 5.0
FROZEN_LOG_ALPHA = 20.0  # its noise-free mask is exactly 1, and exactly 0 with the sign turned
RELAXED_SHARE = (2, 3)  # of the steps


def freeze_step(total_steps: int) -> int:
    """Return the number of optimizer steps after which the mask is frozen: two thirds of all, rounded up."""
    part, whole = RELAXED_SHARE
    return -(-total_steps * part // whole)


def kept_entries(numel: int, sparsity: float) -> int:
    """Return the number of entries of a difference that are not zero at the end."""
    return numel - round(sparsity * numel)


def gate(log_alpha: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the relaxed mask and its slope.

    Args:
        log_alpha: Logits.
        noise: Uniform numbers in (0, 1) of the same shape, or None for the noise-free mask.

    Returns:
        The mask in [0, 1], and its derivative with respect to the logits.
    """
    low, high = STRETCH
    logits = log_alpha
    if noise is not None:
        noise = noise.to(log_alpha.dtype)
        logits = log_alpha + (noise.log() - torch.log1p(-noise))  # logistic
    s = torch.sigmoid(logits)
    stretched = s * (high - low) + low
    slope = s.mul(1 - s).mul_(high - low).mul_((stretched >= 0) & (stretched <= 1))
    return stretched.clamp_(0.0, 1.0), slope


class _Difference:
    """The difference of one module."""

    def __init__(
        self, site: Site, weight: AdapterParameter, log_alpha: AdapterParameter, columns: Tensor | None
    ) -> None:
        self.path = site.path
        self.weight = weight
        self.log_alpha = log_alpha
        self.mask: Tensor | None = None  # bool, once frozen
        device = weight.value.device
        self.columns = columns
        self.rows = site.part.features.to(device)
        self.inputs = site.inputs.to(device)
        # Along the dimension in which tensor ranks divide it.
        self.held = self.rows if site.info.column_parallel else self.inputs


class _Differences(Adapter):
    """The differences of one task at one BaseOp."""

    stages = frozenset({"product"})

    def __init__(self, owner: DiffPruning, differences: list[_Difference]) -> None:
        self.owner = owner
        self.differences = differences

    def product(self, x: Tensor, y: Tensor, batch: PackedBatch) -> Tensor:
        """See `Adapter.product`."""
        for difference in self.differences:
            key = None
            if batch.training and difference.mask is None:
                key = key_of(
                    self.owner.seed, batch.task_steps[self.owner.name], "diff_pruning", difference.path
                )
            weight, log_alpha = difference.weight.value, difference.log_alpha.value
            delta: Tensor = _DifferenceProduct.apply(x, weight, log_alpha, difference, key)  # type: ignore[no-untyped-call]
            y = y + delta if difference.columns is None else y.index_add(1, difference.columns, delta)
        return y


class _DifferenceProduct(torch.autograd.Function):
    """`x (z * d)^T`. The mask is made again in the backward, so that nothing as large as the weight is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, d: Tensor, log_alpha: Tensor, difference: _Difference, key: int | None
    ) -> Tensor:
        ctx.save_for_backward(x, d, log_alpha)
        ctx.difference, ctx.key, ctx.mask = difference, key, difference.mask
        z, _ = _mask_of(log_alpha, difference, ctx.mask, key)
        return x @ (z * d).to(x.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, d, log_alpha = ctx.saved_tensors
        z, slope = _mask_of(log_alpha, ctx.difference, ctx.mask, ctx.key)
        dx = dy @ (z * d).to(dy.dtype) if ctx.needs_input_grad[0] else None
        product = (dy.t() @ x).to(d.dtype)
        d_log_alpha = None if slope is None else (product * d).mul_(slope)
        return dx, product.mul_(z), d_log_alpha, None, None


def _mask_of(
    log_alpha: Tensor, difference: _Difference, mask: Tensor | None, key: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return the current mask, and its slope unless the mask is frozen."""
    if mask is not None:
        return mask, None
    noise = None if key is None else uniform(key, difference.rows, difference.inputs)
    return gate(log_alpha, noise)


class DiffPruning(TaskAdapter):
    """Diff pruning of one task."""

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        self.differences: list[_Difference] = []
        super().build()

    def adapt(self, modules: list[tuple[Site, list[AdapterParameter]]]) -> _Differences:
        """See `TaskAdapter.adapt`."""
        made = [
            _Difference(site, weight, log_alpha, self.host.columns(site))
            for site, (weight, log_alpha) in modules
        ]
        self.differences += made
        return _Differences(self, made)

    @torch.no_grad()
    def penalty(self, step: int) -> Tensor | float:
        """Add the gradient of `l0_weight` times the expected number of non-zeros; see `TaskAdapter.penalty`."""
        low, high = STRETCH
        total: Tensor | float = 0.0
        for difference in self.differences:
            if difference.mask is not None:
                continue
            logits = difference.log_alpha.value
            alive = torch.sigmoid(logits - math.log(-low / high))
            slope = alive * (1 - alive) * self.spec.l0_weight
            assert logits.grad is not None
            logits.grad.add_(slope)
            total = total + alive.sum() * self.spec.l0_weight
        return total

    @torch.no_grad()
    def after_step(self, step: int, skip: Tensor | None = None) -> None:
        """Freeze the mask after `freeze_step` steps; from then on keep pruned entries at zero."""
        if step < freeze_step(self.total_steps):
            return
        if skip is None:
            skip = torch.zeros((), dtype=torch.bool, device=self.host.device)
        for difference in self.differences:
            weight, log_alpha = difference.weight.value, difference.log_alpha.value
            if difference.mask is None:
                z, _ = gate(log_alpha, None)
                weight.copy_(torch.where(skip, weight, weight * z))
                difference.mask = self._largest(difference)
            # The optimizer's momentum moves entries that have no gradient any more.
            weight.copy_(torch.where(skip, weight, weight * difference.mask))
            frozen = torch.where(difference.mask, FROZEN_LOG_ALPHA, -FROZEN_LOG_ALPHA).to(log_alpha.dtype)
            log_alpha.copy_(torch.where(skip, log_alpha, frozen))

    def rollback_after(self, steps: int) -> None:
        """See `TaskAdapter.rollback_after`: a mask that a skipped step has frozen is dropped."""
        if steps < freeze_step(self.total_steps):
            for difference in self.differences:
                difference.mask = None

    def state(self) -> dict[str, Tensor]:
        """The frozen masks, by the key of the difference. See `TaskAdapter.state`."""
        return {d.weight.key: d.mask.to(torch.uint8) for d in self.differences if d.mask is not None}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `TaskAdapter.load_state`."""
        for difference in self.differences:
            full = state.get(difference.weight.key)
            if full is not None:
                mask = difference.weight.slice_of(full)
                difference.mask = mask.to(device=self.host.device, dtype=torch.bool)

    def _largest(self, difference: _Difference) -> Tensor:
        """Which entries are kept: the largest of the whole module, over all tensor ranks; of equal ones, the first."""
        record = difference.weight
        assert record.dim is not None
        full = record.value.new_zeros(record.full_shape)
        full.index_copy_(record.dim, difference.held, record.value.abs())
        if self.host.parallel.tp_size > 1:
            # Each element comes from one rank, the others add zero: exact.
            dist.all_reduce(full, group=self.host.parallel.tp_group)
        order = full.flatten().sort(descending=True, stable=True).indices
        kept = torch.zeros(full.numel(), dtype=torch.bool, device=full.device)
        kept.index_fill_(0, order[: kept_entries(full.numel(), self.spec.sparsity)], True)
        return kept.view(record.full_shape).index_select(record.dim, difference.held)


class DiffPruningSpec(AdapterSpec):
    """Diff pruning (Guo et al.): a sparse difference to a module's weight, its mask learned with it."""

    peft_type: Literal["DIFF_PRUNING"]
    """The method."""
    sparsity: Number = Field(default=0.995, ge=0, lt=1)
    """Share of the difference that is zero at the end."""
    l0_weight: Number = Field(default=1.25e-7, ge=0)
    """Weight of the expected number of non-zeros in the objective."""
    target_modules: Targets = None
    """Modules that get a difference; None: the ones peft would choose for LoRA."""

    run_time = DiffPruning
    in_peft = False
    acts_in_steps = True
    free_with_weights = frozenset({"l0_weight", "sparsity"})
    refused = OUR_FIELDS

    def modules(self, shape: BackboneShape) -> list[Module]:
        """See `AdapterSpec.modules`; the regulariser counts elements where tensor ranks divide them."""
        modules = super().modules(shape)
        whole = short_names(module for module in modules if module.replicated)
        if whole:
            raise UserError(
                f"target_modules: {', '.join(whole)} cannot be pruned: every tensor rank has them whole; name others"
            )
        return modules

    def module_tensors(self, module: Module, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.module_tensors`: divided as the weight is."""
        size, dim = (module.out_features, module.in_features), 0 if module.column_parallel else 1
        return {
            "diff.weight": AdapterTensor(size, module.layer, constant(0.0), dim),
            "diff.log_alpha": AdapterTensor(
                size, module.layer, constant(INITIAL_LOG_ALPHA), dim, decay=False
            ),
        }

    def freezes_after(self, total_steps: int) -> int:
        """See `AdapterSpec.freezes_after`: its mask."""
        return freeze_step(total_steps)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """See `AdapterSpec.samples`."""

        def section(op: BaseOpName, names: Sequence[str]) -> AdapterSpec:
            return cls(peft_type="DIFF_PRUNING", target_modules=list(names))

        return [Sample(section, paired=True)]

    def curve(self, modules: int) -> Curve:
        """See `AdapterSpec.curve`."""
        return Curve("DIFF_PRUNING")

    def work(self, place: BaseOpWidths) -> Work:
        """See `AdapterSpec.work`."""
        inputs, outputs = place.in_features, place.out_features
        return Work(2 * inputs * outputs, inputs + 2 * outputs, 4 * inputs * outputs)


KIND = DiffPruningSpec
