"""Memory of optimizers in full fine-tuning, by the names of `transformers.TrainingArguments.optim`.

Those of tasks are in `megatron_mux.optimizers`.

`states` are bytes kept from step to step, `step` bytes that one step allocates and frees. If these are no multiple of
the number of weights, they depend on the shapes of a model's tensors: see `Shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_mux.optimizers.blocks import BLOCK, SMALL

Zero = Literal[0, 1, 2, 3]
"""What data-parallel ranks shard: nothing, optimizer states (1), also gradients (2), also weights (3)."""


@dataclass(frozen=True)
class Shapes:
    """Sums over a model's tensors that optimizer memory depends on.

    Attributes:
        lines: Number of rows and columns of all matrices and of values of all vectors: Adafactor's second moments.
        exact: Number of values of embeddings and small tensors, whose moments 8-bit optimizers keep in fp32.
        largest: Number of values of the largest tensor.
    """

    lines: int = 0
    exact: int = 0
    largest: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], embeds: bool) -> Shapes:
        """The shapes of one tensor.

        Args:
            embeds: Whether it belongs to an embedding of tokens or positions.
        """
        count = lines = math.prod(shape)
        if len(shape) > 1:
            lines = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
        return cls(lines, count if embeds or count < SMALL else 0, count)

    def __add__(self, other: Shapes) -> Shapes:
        return Shapes(self.lines + other.lines, self.exact + other.exact, max(self.largest, other.largest))


@dataclass(frozen=True)
class Optimizer:
    """Memory of an optimizer.

    Attributes:
        kept: Number of states as large as the weights, in their precision.
        made: Number of temporary copies of all gradients in a step.
        megatron: Its name in Megatron-LM; None if Megatron-LM lacks it.
        traced: Whether its steps can be traced; else only closed forms know it.
        in_turn: Whether it steps one tensor at a time instead of lists of tensors.
        zeros: Stages of sharding that support it, in Megatron-LM if that has it, else in transformers.
    """

    kept: int = 0
    made: int = 0
    megatron: str | None = None
    traced: bool = True
    in_turn: bool = False
    zeros: tuple[Zero, ...] = (0,)

    def state_size(self, size: int) -> float:
        """Bytes of state for a value of a large matrix.

        Args:
            size: Bytes of a value of the weights that it steps.
        """
        return self.kept * size

    def states(self, values: float, shapes: Shapes, size: int) -> float:
        """Bytes of all states."""
        return self.state_size(size) * values

    def step(self, values: float, shapes: Shapes, size: int) -> float:
        """Bytes that a step allocates and frees; arguments as for `states`."""
        return self.made * size * values


class _Adafactor(Optimizer):
    """`transformers.optimization.Adafactor` without a first moment, as `Trainer` uses it: one tensor at a time."""

    def states(self, values: float, shapes: Shapes, size: int) -> float:
        return 4.0 * shapes.lines

    def step(self, values: float, shapes: Shapes, size: int) -> float:
        # The squared gradient with and without epsilon; fp32 copies of half-precision weights and gradients.
        return 4.0 * (2 if size == 4 else 4) * shapes.largest


class _EightBit(Optimizer):
    """AdamW of bitsandbytes: two moments of one byte, and their scales for each block of values."""

    def state_size(self, size: int) -> float:
        return 2 * (1 + 4 / BLOCK)

    def states(self, values: float, shapes: Shapes, size: int) -> float:
        exact = min(float(shapes.exact), values)
        return 8 * exact + self.state_size(size) * (values - exact)


_EIGHT_BIT = _EightBit(traced=False, in_turn=True)

_MEGATRON: tuple[Zero, ...] = (0, 1, 2, 3)
"""Only Adam: the distributed optimizer, which Megatron-FSDP uses too, refuses SGD."""
_FSDP: tuple[Zero, ...] = (0, 2, 3)
"""torch's FSDP2 gathers weights for a pass, or for a step (2). transformers' Adafactor, which mixes whole and sharded
tensors, and the kernels of bitsandbytes do not work with it."""

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
"""Optimizers by name, the default of `transformers` first. Of those that need further packages, only bitsandbytes' are
included."""
DEFAULT = "adamw_torch_fused"
"""The default of `transformers`."""
