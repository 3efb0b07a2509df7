"""One task's optimizer, schedule and clipping; the sum of gradients over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.flat_params import FlatParams
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.optimizers.adamw import AdamW
from megatron_mux.optimizers.optimizer import Options, ParamGroup, ParamLayout, ParamSlice, Stored
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.runtime import GRADIENTS_AT_ONCE, Parallel
from megatron_mux.tasks import TrainingSpec

Flats = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Values, gradients and, unless the optimizer is SGD, both moments, `[n]` each."""

_Alike = tuple[float, float, bool]
"""What neighbouring parameters must share to be stepped together: weight decay, the learning rate as a multiple of the
task's, and whether this rank counts their norm."""


class TaskOptimizer:
    """A task's optimizer over its adapter's flat parameters, with the options and defaults of `transformers`.

    Args:
        adapter: The adapter on this rank (it may have no parameters here).
        spec: The task's `training`.
        total_steps: Steps its schedule spans.
        lengths: How many it spanned before, see `optimizers.schedules.continued`.

    Attributes:
        kind: Steps the values; see `optimizers.registry`.

    Raises:
        UserError: The optimizer does not work with how the adapter is divided.
    """

    def __init__(
        self,
        adapter: TaskAdapter,
        spec: TrainingSpec,
        total_steps: int,
        lengths: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.flat_params = adapter.flat_params
        self.parameters = list(adapter.parameters)
        self.spec = spec
        self._factor = spec.rate_curve(total_steps, lengths)
        kind, parallel = OPTIMIZERS[spec.optim], adapter.host.parallel
        if not kind.splits:
            parallel.experts.refuse("optimizer", spec.optim)
        self._tensors, self._ranks = adapter.tensors, parallel.tp_size
        self._runs = self.flat_params.runs(self._alike)
        groups = [ParamGroup(first, last, decay, rate) for first, last, (decay, rate, _) in self._runs]
        group = parallel.tp_group if parallel.tp_size > 1 else None
        layout = ParamLayout(
            self.flat_params.values, self.flat_params.gradients, groups, self._slices(), group
        )
        self.optimizer = kind(layout, Options(spec.adam_beta1, spec.adam_beta2, spec.adam_epsilon))

    def _alike(self, p: AdapterParameter) -> _Alike:
        return (*self.spec.decay_and_rate(p.key, p.full_shape, p.decay), p.owner)

    def _slices(self) -> list[ParamSlice]:
        slices = []
        for p in self.parameters:
            first, last = self.flat_params.place(p)
            decay, rate, _ = self._alike(p)
            divided = self._tensors[p.key].dim if self._ranks > 1 else None
            slices.append(ParamSlice(p, tuple(p.value.shape), ParamGroup(first, last, decay, rate), divided))
        return slices

    @property
    def owned(self) -> list[Tensor]:
        """The gradients whose norm this rank counts: every element of the whole adapter is counted on one rank."""
        return [self.flat_params.gradients[first:last] for first, last in self.flat_params.ranges(owner=True)]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that the optimizer keeps from step to step."""
        return self.optimizer.tensors

    @property
    def is_fused(self) -> bool:
        """Whether `kernels.update.triton` can step it together with other tasks."""
        return self.optimizer.together

    def pieces(self) -> Iterator[tuple[Flats, Tensor | None, float, float, bool]]:
        """Runs of parameters that are updated alike: their tensors, their copy if it is another one, weight decay, the
        learning rate as a multiple of the task's, and whether this rank counts their norm.
        """
        flat_params, states = (
            self.flat_params,
            self.optimizer.flats if isinstance(self.optimizer, AdamW) else {},
        )
        for first, last, (decay, rate, owner) in self._runs:
            average, square = (states[name][first:last] if states else None for name in AdamW.state_names)
            flats = flat_params.values[first:last], flat_params.gradients[first:last], average, square
            copy = None if flat_params.copies is flat_params.values else flat_params.copies[first:last]
            yield flats, copy, decay, rate, owner

    def options(self, step: int) -> tuple[float, float, float, float, float, int]:
        """Learning rate, betas, epsilon, the norm to clip to (0: any) and steps done, of optimizer step `step`."""
        spec = self.spec
        betas = spec.adam_beta1, spec.adam_beta2
        return self.learning_rate(step), *betas, spec.adam_epsilon, max(0.0, spec.max_grad_norm), step + 1

    def learning_rate(self, step: int) -> float:
        """The rate that optimizer step `step` (from 0) uses."""
        return self.spec.learning_rate * self._factor(step)

    def clip(self, norm: Tensor) -> None:
        """Scale the gradients so that their norm, the scalar `norm` over all ranks, is at most `max_grad_norm`."""
        limit = self.spec.max_grad_norm
        if limit > 0:
            # The same expression as torch.nn.utils.clip_grad_norm_.
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            self.flat_params.gradients.mul_(scale.to(self.flat_params.gradients.dtype))

    @torch.no_grad()
    def step(self, step: int, skip: Tensor) -> None:
        """Update the parameters as optimizer step `step` (from 0), and make the gradients zero.

        Args:
            step: Sets the learning rate.
            skip: Scalar fp32 on the device: unless it is zero, parameters and states stay as they are.
        """
        self.optimizer.update(step, self.learning_rate(step), skip)
        self.flat_params.refresh()
        self.zero()

    def zero(self) -> None:
        """Make the gradients zero."""
        self.flat_params.zero()

    def state(self) -> dict[str, dict[str, Stored]]:
        """What this rank holds of the optimizer's state, by parameter key and name; empty for SGD."""
        return self.optimizer.state()

    def load_state(self, full: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore `state()` from full tensors by key and name, cut to this rank's shards."""
        if full:
            for param in self.optimizer.layout.slices:
                self.optimizer.load(param, full[param.parameter.key])


def gradient_buffer_size(params: Sequence[FlatParams], parallel: Parallel) -> int:
    """Bytes of the buffer in which the gradients of these tasks are summed over ranks; 0 on a single rank."""
    if parallel.tp_size * parallel.dp_size == 1 or not params:
        return 0
    values = sum(flat_params.values.numel() for flat_params in params)
    return min(values, GRADIENTS_AT_ONCE) * params[0].values.dtype.itemsize


def reduce_gradients(params: Sequence[FlatParams], parallel: Parallel, flags: Tensor, buffer: Tensor) -> None:
    """Sum gradients over ranks: partial ones over tensor ranks, all of them over data-parallel ranks.

    Few collectives for all tasks together, in a buffer that is there already. A sum never mixes elements, so a task's
    NaN stays its own.

    Args:
        params: Of every task of the bucket.
        parallel: Where this rank stands.
        flags: Summed over data-parallel ranks along with them.
        buffer: `[n]` uint8, as long on every rank; `gradient_buffer_size` of these tasks or more.
    """
    if params and buffer.numel():
        part = buffer.view(params[0].gradients.dtype)
        if parallel.tp_size > 1:
            partial = [a.gradients[first:last] for a in params for first, last in a.ranges(partial=True)]
            _all_reduce(partial, part, parallel.tp_group)
        if parallel.dp_size > 1:
            _all_reduce([flat_params.gradients for flat_params in params], part, parallel.dp_group)
    if parallel.dp_size > 1:
        dist.all_reduce(flags, group=parallel.dp_group)


def _all_reduce(flats: Sequence[Tensor], buffer: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum flat gradients, as many values at once as the buffer holds: the same ones on every rank.

    Those that would fill the buffer alone are summed where they are.
    """
    large = [flat for flat in flats if flat.numel() > buffer.numel()]
    small = [flat for flat in flats if 0 < flat.numel() <= buffer.numel()]
    for flat in large:
        dist.all_reduce(flat, group=group)
    while small:
        size, count = 0, 0
        while count < len(small) and size + small[count].numel() <= buffer.numel():
            size += small[count].numel()
            count += 1
        together, small = small[:count], small[count:]
        pieces = list(buffer[:size].split([flat.numel() for flat in together]))
        torch._foreach_copy_(pieces, together)
        dist.all_reduce(buffer[:size], group=group)
        torch._foreach_copy_(together, pieces)
