"""What is trained, in which precision and with which optimizer: the choices that change results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.memory.optimizers import DEFAULT, OPTIMIZERS, Optimizer

Attention = Literal["flash", "eager"]
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Recipe:
    """What is trained and how: choices that change results, and so are the user's.

    Attributes:
        length: Tokens of the longest sequence.
        precision: Precision of matrix products; of weights and hidden states too, except under autocast.
        optimizer: Optimizer of full fine-tuning, a name of `OPTIMIZERS`; tasks have their own.
        master: Whether half precision has fp32 weights, gradients and moments: beside half-precision weights, as in
            Megatron's mixed precision, or alone, under the autocast of `transformers`. If not, all of these are in
            half precision.
        attention: Whether scores are kept (`eager`).
        adapters: The tasks of one hybrid task on a frozen backbone; empty: every parameter is trained.
        mix: Each task's share of a micro-batch's rows; empty: equal shares.
    """

    length: int
    precision: Precision = "bf16"
    optimizer: str = DEFAULT
    master: bool = True
    attention: Attention = "flash"
    adapters: tuple[TaskAdapters, ...] = ()
    mix: tuple[float, ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        """Each task's share of a micro-batch's rows."""
        count = len(self.adapters)
        return self.mix or (1 / count,) * count

    @property
    def mean_length(self) -> float:
        """Mean length of the sequence that a row belongs to, over rows."""
        if not self.frozen:
            return self.length
        return sum(share * task.length for share, task in zip(self.shares, self.adapters, strict=True))

    @property
    def frozen(self) -> bool:
        """Whether only adapters are trained."""
        return bool(self.adapters)

    @property
    def size(self) -> int:
        """Bytes of a weight in matrix products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def weight_size(self) -> int:
        """Bytes of a weight between uses."""
        return 4 if self.autocast else self.size

    @property
    def by_trainer(self) -> bool:
        """Whether `transformers.Trainer` runs it: full fine-tuning with an optimizer that Megatron-LM does not have."""
        return not self.frozen and self.keeps.megatron is None

    @property
    def autocast(self) -> bool:
        """Whether weights are in fp32, and products take half-precision copies of them: `bf16=True` of `Trainer`."""
        return self.by_trainer and self.master and self.size < 4

    @property
    def has_master(self) -> bool:
        """Whether there are fp32 copies of weights."""
        return self.master and self.size < 4 and not self.frozen and not self.by_trainer

    @property
    def gradient_size(self) -> int:
        """Bytes of a gradient's value."""
        return 4 if self.frozen or self.has_master else self.weight_size

    @property
    def keeps(self) -> Optimizer:
        """The optimizer of full fine-tuning."""
        return OPTIMIZERS[self.optimizer]

    @property
    def master_size(self) -> int:
        """Bytes of the fp32 copy of a weight's value."""
        return 4 if self.has_master else 0
