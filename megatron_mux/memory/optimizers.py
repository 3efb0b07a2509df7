"""What optimizers of `transformers.TrainingArguments` keep and take, by the names that its `optim` has.

`states` is what they keep from step to step, `step` what one step makes anew and gives back. Where a form is no
multiple of the weights, a model's tensors decide: see `Shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Zero = Literal[0, 1, 2, 3]
"""What data-parallel ranks divide: nothing, optimizer states (1), gradients too (2), weights too (3)."""
_SMALL = 4096
"""Values of a tensor below which 8-bit optimizers keep moments in fp32."""
_BLOCK = 256
"""Values that share a scale in 8-bit moments."""


@dataclass(frozen=True)
class Shapes:
    """What optimizers need to know of some tensors beside how many values they have.

    Attributes:
        lines: Values of a row and of a column of each matrix, and all of each vector: Adafactor's second moments.
        exact: Values of embeddings and of small tensors: of those, 8-bit optimizers keep moments in fp32.
        largest: Values of the largest tensor.
    """

    lines: int = 0
    exact: int = 0
    largest: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], embeds: bool) -> Shapes:
        """Of one tensor.

        Args:
            shape: Its sizes.
            embeds: Whether it is a module's that looks up tokens or positions.
        """
        count = lines = math.prod(shape)
        if len(shape) > 1:
            lines = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
        return cls(lines, count if embeds or count < _SMALL else 0, count)

    def __add__(self, other: Shapes) -> Shapes:
        return Shapes(self.lines + other.lines, self.exact + other.exact, max(self.largest, other.largest))


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps and takes.

    Attributes:
        kept: States with a value for each value of the weights, in their precision.
        made: Lists of tensors like all gradients that a step makes anew.
        megatron: Megatron-LM's name of it; None if it has none.
        traced: Whether its steps can be traced; else there are closed forms alone.
        in_turn: Whether it steps one tensor after the other, not lists of them.
        zeros: What data-parallel ranks can divide with it, by what has it: Megatron-LM, or else transformers.
    """

    kept: int = 0
    made: int = 0
    megatron: str | None = None
    traced: bool = True
    in_turn: bool = False
    zeros: tuple[Zero, ...] = (0,)

    def state_size(self, size: int) -> float:
        """Bytes that it keeps for a value of a large matrix.

        Args:
            size: Bytes of a value of the weights that it steps.
        """
        return self.kept * size

    def states(self, values: float, shapes: Shapes, size: int) -> float:
        """Bytes that it keeps.

        Args:
            values: Of the weights.
            shapes: Of their tensors.
            size: Bytes of a value.
        """
        return self.state_size(size) * values

    def step(self, values: float, shapes: Shapes, size: int) -> float:
        """Bytes that a step makes anew; arguments as for `states`."""
        return self.made * size * values


class _Adafactor(Optimizer):
    """`transformers.optimization.Adafactor` without a first moment, as `Trainer` has it: one tensor after the other."""

    def states(self, values: float, shapes: Shapes, size: int) -> float:
        return 4.0 * shapes.lines

    def step(self, values: float, shapes: Shapes, size: int) -> float:
        # The squared gradient, and it with something added; fp32 copies of half-precision weights and gradients.
        return 4.0 * (2 if size == 4 else 4) * shapes.largest


class _EightBit(Optimizer):
    """AdamW of bitsandbytes: two moments of a byte and, for each block of values, their scales."""

    def state_size(self, size: int) -> float:
        return 2 * (1 + 4 / _BLOCK)

    def states(self, values: float, shapes: Shapes, size: int) -> float:
        exact = min(float(shapes.exact), values)
        return 8 * exact + self.state_size(size) * (values - exact)


_EIGHT_BIT = _EightBit(traced=False, in_turn=True)

_MEGATRON: tuple[Zero, ...] = (0, 1, 2, 3)
"""Of Adam alone: its distributed optimizer, which Megatron-FSDP has too, refuses SGD."""
_FSDP: tuple[Zero, ...] = (0, 2, 3)
"""FSDP2 of torch: weights are brought for a pass, or for a step (2). With it neither transformers' Adafactor can step
(it mixes whole and divided tensors) nor the kernels of bitsandbytes."""

OPTIMIZERS: Mapping[str, Optimizer] = {
    # Sources: torch.optim's `_multi_tensor_*` (2.13), transformers/optimization.py and trainer.py (5.23: which
    # embeddings stay in fp32), bitsandbytes/optim/optimizer.py (0.45 and later: Optimizer2State.init_state).
    "adamw_torch_fused": Optimizer(kept=2, megatron="adam", zeros=_MEGATRON),
    "adamw_torch": Optimizer(kept=2, made=1, megatron="adam", zeros=_MEGATRON),  # roots of second moments
    "adafactor": _Adafactor(in_turn=True),
    "adagrad": Optimizer(kept=1, made=2, zeros=_FSDP),  # roots, and gradients times the learning rate
    "rmsprop": Optimizer(kept=1, made=1, zeros=_FSDP),
    "sgd": Optimizer(megatron="sgd"),
    "adamw_bnb_8bit": _EIGHT_BIT,
    "adamw_8bit": _EIGHT_BIT,  # an alias
}
"""By name, what `transformers` takes first. Left out are those that need further packages, but for bitsandbytes'."""
DEFAULT = "adamw_torch_fused"
"""What `transformers` takes unless told otherwise."""
