"""Adafactor as `transformers.Trainer` sets it up: no first moment, no relative step, no scaling by the parameter.

Second moments of a matrix are kept as a mean for each row and one for each column. Under tensor parallelism a rank has
some of the rows or some of the columns; a mean over what is divided, and the size of an update, are then sums over
ranks: two small collectives a step. Parameters of one shape are stepped together, so that launches do not grow with
their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.optimizers.optimizer import Optimizer, Options, ParamLayout, ParamSlice, Stored

_EPSILON = 1e-30
"""Added to squared gradients."""
_DECAY_RATE = -0.8
_AT_ONCE = 1 << 20
"""Values that are stepped together: bounds the buffers."""
_ROW, _COLUMN, _WHOLE = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"


def _kept_dims(dims: int) -> dict[str, tuple[int, ...]]:
    """The dimensions of a parameter that each of its states has."""
    every = tuple(range(dims))
    return {_ROW: every[:-1], _COLUMN: (*every[:-2], dims - 1)} if dims > 1 else {_WHOLE: every}


class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, 2018), which clips each tensor's update to a root mean square of 1."""

    names = ("adafactor",)
    states_per_value = None
    splits, by_shape = False, True
    launches, traffic, at_once = 40, 200, _AT_ONCE

    def __init__(self, layout: ParamLayout, options: Options) -> None:
        super().__init__(layout, options)
        total = sum(math.prod(param.shape) for param in layout.slices)
        largest = max((math.prod(param.shape) for param in layout.slices), default=0)
        size = max(largest, min(_AT_ONCE, total))
        self._first, self._second = (torch.empty_like(layout.values[:size]) for _ in range(2))
        self._stacks = [_Stack(slices, layout) for slices in _alike(layout.slices)]

    @torch.no_grad()
    def update(self, step: int, rate: float, skip: Tensor) -> None:
        """See `Optimizer.update`."""
        skipped = skip != 0
        kept = 1.0 - math.pow(step + 1, _DECAY_RATE)
        means = [self._means(stack) for stack in self._stacks]
        self._sum_over_ranks(
            [new[stack.partial] for stack, new in zip(self._stacks, means, strict=True) if stack.partial]
        )
        for stack, new in zip(self._stacks, means, strict=True):
            for name, state in stack.states.items():
                new[name].mul_(1.0 - kept).add_(state, alpha=kept)
        squares = [
            self._direction(stack, new).square_().flatten(1).sum(dim=1)
            for stack, new in zip(self._stacks, means, strict=True)
        ]
        self._sum_over_ranks(
            [square for stack, square in zip(self._stacks, squares, strict=True) if stack.divided is not None]
        )
        for stack, new, square in zip(self._stacks, means, squares, strict=True):
            self._step(stack, new, square, rate * stack.group.rate, skipped)
            for name, state in stack.states.items():
                torch.where(skipped, state, new[name], out=state)

    def _means(self, stack: _Stack) -> dict[str, Tensor]:
        """Means of the squared gradients by the name of the state that they enter; of what this rank has."""
        gradients, full = stack.gather(stack.gradients, self._second), stack.full_shape
        squares = torch.mul(gradients, gradients, out=gradients).add_(_EPSILON)
        if len(full) < 2:
            return {_WHOLE: squares.clone()}
        return {_ROW: squares.sum(dim=-1).div_(full[-1]), _COLUMN: squares.sum(dim=-2).div_(full[-2])}

    def _sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Sum small tensors over tensor ranks, in place; each of them by itself, so that a NaN stays its own."""
        if not tensors:
            return
        together = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(together, group=self.layout.group)
        for tensor, whole in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(whole.view_as(tensor))

    def _direction(self, stack: _Stack, states: Mapping[str, Tensor]) -> Tensor:
        """Gradients over the root of their estimated second moments; overwrites what it returned before."""
        gradients, out = stack.gather(stack.gradients, self._second), stack.like(self._first)
        if _WHOLE in states:
            return torch.rsqrt(states[_WHOLE], out=out).mul_(gradients)
        row, column = states[_ROW], states[_COLUMN]
        # Rows and columns have the same mean; the one over what is not divided needs no exchange.
        mean = (column if stack.divided == len(stack.shape) - 2 else row).mean(dim=-1, keepdim=True)
        rows = (row / mean).rsqrt_().unsqueeze(-1)
        return torch.mul(rows, column.unsqueeze(-2).rsqrt(), out=out).mul_(gradients)

    def _step(
        self, stack: _Stack, states: Mapping[str, Tensor], squares: Tensor, rate: float, skipped: Tensor
    ) -> None:
        """Step parameters."""
        size = math.prod(stack.full_shape)
        update = self._direction(stack, states)
        clipped = (squares.sqrt_() / size**0.5).clamp_(min=1.0).view(-1, *(1 for _ in stack.shape))
        update.div_(clipped).mul_(rate)
        new = stack.gather(stack.values, self._second)
        new.add_(new, alpha=-stack.group.weight_decay * rate).sub_(update)
        # Selected, not scaled by zero: what is skipped may be NaN.
        torch.where(skipped, stack.gather(stack.values, self._first), new, out=new)
        torch._foreach_copy_(stack.values, new.unbind())

    @property
    def tensors(self) -> list[Tensor]:
        """See `Optimizer.tensors`."""
        states = [state for stack in self._stacks for state in stack.states.values()]
        return [*states, self._first, self._second]

    def state(self) -> dict[str, dict[str, Stored]]:
        """See `Optimizer.state`."""
        found = {}
        for stack in self._stacks:
            for i, param in enumerate(stack.slices):
                p, own = param.parameter, dict[str, Stored]()
                for name, dims in _kept_dims(len(param.shape)).items():
                    shape = tuple(p.full_shape[dim] for dim in dims)
                    dim, index = (dims.index(p.dim), p.index) if p.dim in dims else (None, None)
                    own[name] = Stored(stack.states[name][i], shape, dim, index)
                found[p.key] = own
        return {param.parameter.key: found[param.parameter.key] for param in self.layout.slices}

    def load(self, param: ParamSlice, full: Mapping[str, Tensor]) -> None:
        """See `Optimizer.load`."""
        for name, stored in self.state()[param.parameter.key].items():
            stored.tensor.copy_(stored.slice_of(full[name]))


class _Stack:
    """Parameters of one shape that are stepped alike, by operators that take all of them.

    Attributes:
        states: By name, `[parameters, ...]`.
        partial: The state whose mean is over a dimension that ranks divide; empty: none.
    """

    def __init__(self, slices: Sequence[ParamSlice], layout: ParamLayout) -> None:
        self.slices, one = tuple(slices), slices[0]
        self.shape, self.full_shape = one.shape, one.parameter.full_shape
        self.divided, self.group = one.divided, one.group
        self.values = [param.of(layout.values) for param in slices]
        self.gradients = [param.of(layout.gradients) for param in slices]
        kept = _kept_dims(len(self.shape))
        self.states = {
            name: layout.values.new_zeros([len(slices), *(self.shape[i] for i in dims)])
            for name, dims in kept.items()
        }
        missing = [
            name for name, dims in kept.items() if self.divided is not None and self.divided not in dims
        ]
        self.partial = missing[0] if missing else ""

    def like(self, buffer: Tensor) -> Tensor:
        """The beginning of a buffer, `[parameters, *shape]`."""
        return buffer[: len(self.slices) * math.prod(self.shape)].view(len(self.slices), *self.shape)

    def gather(self, tensors: list[Tensor], buffer: Tensor) -> Tensor:
        """Copy values or gradients of the parameters into a buffer, one behind the other."""
        return torch.stack(tensors, out=self.like(buffer))


def _alike(slices: Sequence[ParamSlice]) -> list[list[ParamSlice]]:
    """Parameters in groups of at most `_AT_ONCE` values that one operator can step."""
    groups: dict[tuple[object, ...], list[ParamSlice]] = {}
    for param in slices:
        group = param.group
        key = param.shape, param.parameter.full_shape, param.divided, group.weight_decay, group.rate
        groups.setdefault(key, []).append(param)
    found = []
    for alike in groups.values():
        count = max(1, _AT_ONCE // max(1, math.prod(alike[0].shape)))
        found += [alike[i : i + count] for i in range(0, len(alike), count)]
    return found
