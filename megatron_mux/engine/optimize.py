"""One task's optimizer, schedule and clipping; the sum of gradients over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        values, gradients = self.arena.values, self.arena.gradients
        # Now, not in the first step: the task is refused if they do not fit.
        self.moments = {} if spec.optim == "sgd" else {name: torch.zeros_like(values) for name in _MOMENTS}
        self._runs: list[tuple[list[Tensor], float]] = []
        for decay in (True, False):
            for first, last in self.arena.ranges(decay=decay):
                flat = (values, gradients, *self.moments.values())
                self._runs.append(([x[first:last] for x in flat], spec.weight_decay * decay))
        self._count = torch.zeros((), device=values.device)

    @property
    def owned(self) -> list[Tensor]:
        """The gradients whose norm this rank counts: every element of the whole adapter is counted on one rank."""
        return [self.arena.gradients[first:last] for first, last in self.arena.ranges(owner=True)]

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
        for (values, gradients, *moments), decay in self._runs:
            # torch's fused optimizers look at `found_inf` for what a gradient scaler has found.
            common: dict[str, Any] = {"lr": rate, "weight_decay": decay, "maximize": False, "found_inf": skip}
            if not moments:
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
            average, square = moments
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


def squared_norms(optimizers: Sequence[TaskOptimizer], device: torch.device) -> Tensor:
    """`[tasks]` fp64, this rank's share of the squared norm of each task's gradient: what it owns."""
    owned = [optimizer.owned for optimizer in optimizers]
    together = [gradients for own in owned for gradients in own]
    norms = iter(torch._foreach_norm(together) if together else ())
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    squares = [[next(norms).double().square() for _ in own] for own in owned]
    return torch.stack([sum(own, start=nothing) for own in squares])


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
