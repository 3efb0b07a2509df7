"""Adafactor as `transformers.Trainer` sets it up: no first moment, no relative step, no scaling by the parameter.

Second moments of a matrix are kept as a mean for each row and one for each column. Under tensor parallelism a rank has
some of the rows or some of the columns; a mean over what is divided, and the size of an update, are then sums over
ranks: two small collectives a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.optimizers.optimizer import Optimizer, Options, Place, Slot, Stored

_EPSILON = 1e-30
"""Added to squared gradients."""
_DECAY_RATE = -0.8
_ROW, _COLUMN, _WHOLE = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"


def _kept_dims(dims: int) -> dict[str, tuple[int, ...]]:
    """The dimensions of a parameter that each of its states has."""
    every = tuple(range(dims))
    return {_ROW: every[:-1], _COLUMN: (*every[:-2], dims - 1)} if dims > 1 else {_WHOLE: every}


class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, 2018), which clips each tensor's update to a root mean square of 1."""

    names = ("adafactor",)
    states_per_value = None
    splits = False

    def __init__(self, place: Place, options: Options) -> None:
        super().__init__(place, options)
        self._states = [
            {name: place.values.new_zeros([slot.shape[i] for i in dims]) for name, dims in _dims(slot)}
            for slot in place.slots
        ]
        size = max((slot.run.last - slot.run.first for slot in place.slots), default=0)
        self._update, self._next = (torch.empty_like(place.values[:size]) for _ in range(2))

    @classmethod
    def state_bytes(cls, shape: Sequence[int], dim: int | None, parts: int) -> float:
        """See `Optimizer.state_bytes`."""
        local = [size / parts if i == dim else size for i, size in enumerate(shape)]
        return sum(4.0 * math.prod(local[i] for i in dims) for dims in _kept_dims(len(local)).values())

    @classmethod
    def scratch_bytes(cls, sizes: Sequence[int]) -> float:
        """See `Optimizer.scratch_bytes`."""
        return 8.0 * max(sizes, default=0)

    @torch.no_grad()
    def update(self, step: int, rate: float, skip: Tensor) -> None:
        """See `Optimizer.update`."""
        slots, skipped = self.place.slots, skip != 0
        kept = 1.0 - math.pow(step + 1, _DECAY_RATE)
        means = [self._means(slot) for slot in slots]
        partial = [(slot, _ROW if slot.divided == len(slot.shape) - 1 else _COLUMN) for slot in slots]
        self._sum_over_ranks(
            [
                new[name]
                for (slot, name), new in zip(partial, means, strict=True)
                if self._is_partial(slot, name)
            ]
        )
        for old, new in zip(self._states, means, strict=True):
            for name, state in old.items():
                new[name].mul_(1.0 - kept).add_(state, alpha=kept)
        squares = [self._direction(slot, new).square_().sum() for slot, new in zip(slots, means, strict=True)]
        self._sum_over_ranks(
            [square for slot, square in zip(slots, squares, strict=True) if slot.divided is not None]
        )
        for slot, old, new, square in zip(slots, self._states, means, squares, strict=True):
            self._step(slot, new, square, rate * slot.run.rate, skipped)
            for name, state in old.items():
                torch.where(skipped, state, new[name], out=state)

    def _means(self, slot: Slot) -> dict[str, Tensor]:
        """Means of the squared gradient by the name of the state that they enter; of what this rank has."""
        gradient, full = slot.of(self.place.gradients), slot.parameter.full_shape
        squares = torch.mul(gradient, gradient, out=self._like(self._update, slot)).add_(_EPSILON)
        if len(full) < 2:
            return {_WHOLE: squares.clone()}
        return {_ROW: squares.sum(dim=-1).div_(full[-1]), _COLUMN: squares.sum(dim=-2).div_(full[-2])}

    @staticmethod
    def _is_partial(slot: Slot, name: str) -> bool:
        """Whether a mean is over a dimension that ranks divide."""
        divided = slot.divided
        return divided is not None and divided not in dict(_dims(slot)).get(name, (divided,))

    def _sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Sum small tensors over tensor ranks, in place; each of them by itself, so that a NaN stays its own."""
        if not tensors:
            return
        together = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(together, group=self.place.group)
        for tensor, whole in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(whole.view_as(tensor))

    def _direction(self, slot: Slot, states: Mapping[str, Tensor]) -> Tensor:
        """The gradient over the root of its estimated second moment; overwrites what it returned before."""
        place, gradient = self._like(self._update, slot), slot.of(self.place.gradients)
        if _WHOLE in states:
            return torch.rsqrt(states[_WHOLE], out=place).mul_(gradient)
        row, column = states[_ROW], states[_COLUMN]
        # Rows and columns have the same mean; the one over what is not divided needs no exchange.
        mean = (column if slot.divided == len(slot.shape) - 2 else row).mean(dim=-1, keepdim=True)
        rows = (row / mean).rsqrt_().unsqueeze(-1)
        return torch.mul(rows, column.unsqueeze(-2).rsqrt(), out=place).mul_(gradient)

    def _step(
        self, slot: Slot, states: Mapping[str, Tensor], square: Tensor, rate: float, skipped: Tensor
    ) -> None:
        """Step a parameter."""
        size = math.prod(slot.parameter.full_shape)
        update = self._direction(slot, states).div_((square.sqrt() / size**0.5).clamp_(min=1.0)).mul_(rate)
        values, new = slot.of(self.place.values), self._like(self._next, slot)
        torch.add(values, values, alpha=-slot.run.weight_decay * rate, out=new).sub_(update)
        # Selected, not scaled by zero: what is skipped may be NaN.
        torch.where(skipped, values, new, out=values)

    @staticmethod
    def _like(buffer: Tensor, slot: Slot) -> Tensor:
        return buffer[: math.prod(slot.shape)].view(slot.shape)

    @property
    def tensors(self) -> list[Tensor]:
        """See `Optimizer.tensors`."""
        return [*(state for own in self._states for state in own.values()), self._update, self._next]

    def state(self) -> dict[str, dict[str, Stored]]:
        """See `Optimizer.state`."""
        found: dict[str, dict[str, Stored]] = {}
        for slot, own in zip(self.place.slots, self._states, strict=True):
            p = slot.parameter
            found[p.key] = {}
            for name, dims in _dims(slot):
                shape = tuple(p.full_shape[i] for i in dims)
                dim, index = (dims.index(p.dim), p.index) if p.dim in dims else (None, None)
                found[p.key][name] = Stored(own[name], shape, dim, index)
        return found

    def load(self, slot: Slot, full: Mapping[str, Tensor]) -> None:
        """See `Optimizer.load`."""
        for name, stored in self.state()[slot.parameter.key].items():
            stored.tensor.copy_(stored.slice_of(full[name]))


def _dims(slot: Slot) -> list[tuple[str, tuple[int, ...]]]:
    return list(_kept_dims(len(slot.shape)).items())
