"""One task's optimizer, schedule and clipping; the sum of gradients over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.arena import Arena
from megatron_mux.runtime import GRADIENTS_AT_ONCE, Parallel
from megatron_mux.tasks import TrainingSpec

_MOMENTS = ("exp_avg", "exp_avg_sq")


Flats = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Values, gradients and, unless the optimizer is SGD, both moments, `[n]` each."""


class TaskOptimizer:
    """A task's optimizer over its adapter's arena, with the options and defaults of `transformers`.

    Args:
        adapter: The adapter on this rank (it may have no parameters here).
        spec: The task's `training`.
        total_steps: Steps its schedule spans.

    Attributes:
        moments: Name to `[n]`, in the order of the arena; empty for SGD.
    """

    def __init__(self, adapter: TaskAdapter, spec: TrainingSpec, total_steps: int) -> None:
        self.arena = adapter.arena
        self.parameters = list(adapter.parameters)
        self.spec = spec
        self._factor = _schedule(spec, total_steps)
        values = self.arena.values
        # Now, not in the first step: the task is refused if they do not fit.
        self.moments = {} if spec.optim == "sgd" else {name: torch.zeros_like(values) for name in _MOMENTS}
        self._count = torch.zeros((), device=values.device)

    @property
    def owned(self) -> list[Tensor]:
        """The gradients whose norm this rank counts: every element of the whole adapter is counted on one rank."""
        return [self.arena.gradients[first:last] for first, last in self.arena.ranges(owner=True)]

    def pieces(self) -> Iterator[tuple[Flats, Tensor | None, float, bool]]:
        """Runs of parameters that are updated alike: their tensors, their copy if it is another one, weight decay, and
        whether this rank counts their norm.
        """
        arena = self.arena
        for decay, owner in itertools.product((True, False), repeat=2):
            for first, last in arena.ranges(decay=decay, owner=owner):
                average, square = (self.moments[n][first:last] if self.moments else None for n in _MOMENTS)
                flats = arena.values[first:last], arena.gradients[first:last], average, square
                copy = None if arena.copies is arena.values else arena.copies[first:last]
                yield flats, copy, self.spec.weight_decay * decay, owner

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
            self.arena.gradients.mul_(scale.to(self.arena.gradients.dtype))

    @torch.no_grad()
    def step(self, step: int, skip: Tensor) -> None:
        """Update the parameters as optimizer step `step` (from 0), and make the gradients zero.

        Args:
            step: Sets the learning rate.
            skip: Scalar fp32 on the device: unless it is zero, parameters and moments stay as they are.
        """
        rate, spec = self.learning_rate(step), self.spec
        for (values, gradients, average, square), _, decay, _ in self.pieces():
            # torch's fused optimizers look at `found_inf` for what a gradient scaler has found.
            common: dict[str, Any] = {"lr": rate, "weight_decay": decay, "maximize": False, "found_inf": skip}
            if average is None or square is None:
                sgd(
                    [values],
                    [gradients],
                    [None],
                    momentum=0.0,
                    dampening=0.0,
                    nesterov=False,
                    fused=True,
                    **common,
                )
                continue
            adamw(
                [values],
                [gradients],
                [average],
                [square],
                [],
                [self._count.fill_(step)],
                beta1=spec.adam_beta1,
                beta2=spec.adam_beta2,
                eps=spec.adam_epsilon,
                amsgrad=False,
                fused=True,
                **common,
            )
        self.arena.refresh()
        self.zero()

    def zero(self) -> None:
        """Make the gradients zero."""
        self.arena.zero()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Local moments by parameter key; empty for SGD."""
        if not self.moments:
            return {}
        return {
            p.key: {name: self.arena.of(p, flat).view(p.value.shape) for name, flat in self.moments.items()}
            for p in self.parameters
        }

    def load_state(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore `state()` of full tensors by key, cut to this rank's shards."""
        for key, own in self.state().items() if moments else ():
            p = next(p for p in self.parameters if p.key == key)
            for name, local in own.items():
                local.copy_(p.slice_of(moments[key][name]))


def _schedule(spec: TrainingSpec, total_steps: int) -> Callable[[int], float]:
    from transformers.optimization import get_scheduler

    # The schedule is a pure function of the step; a throw-away optimizer is what its constructor asks for.
    throw_away = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        spec.lr_scheduler_type,
        throw_away,
        num_warmup_steps=spec.warmup(total_steps),
        num_training_steps=total_steps,
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


def gradient_buffer_size(arenas: Sequence[Arena], parallel: Parallel) -> int:
    """Bytes of the buffer in which these arenas' gradients are summed over ranks; 0 on a single rank."""
    if parallel.tp_size * parallel.dp_size == 1 or not arenas:
        return 0
    values = sum(arena.values.numel() for arena in arenas)
    return min(values, GRADIENTS_AT_ONCE) * arenas[0].values.dtype.itemsize


def reduce_gradients(arenas: Sequence[Arena], parallel: Parallel, flags: Tensor, buffer: Tensor) -> None:
    """Sum gradients over ranks: partial ones over tensor ranks, all of them over data-parallel ranks.

    Few collectives for all tasks together, in a buffer that is there already. A sum never mixes elements, so a task's
    NaN stays its own.

    Args:
        arenas: Of every task of the bucket.
        parallel: Where this rank stands.
        flags: Summed over data-parallel ranks along with them.
        buffer: `[n]` uint8, as long on every rank; `gradient_buffer_size` of these arenas or more.
    """
    if arenas and buffer.numel():
        part = buffer.view(arenas[0].gradients.dtype)
        if parallel.tp_size > 1:
            partial = [a.gradients[first:last] for a in arenas for first, last in a.ranges(partial=True)]
            _all_reduce(partial, part, parallel.tp_group)
        if parallel.dp_size > 1:
            _all_reduce([arena.gradients for arena in arenas], part, parallel.dp_group)
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
