"""Tensors that a layer keeps from its forward to its backward pass, as widths of a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_mux.adapters.costs import Where
from megatron_mux.gpus import Gpu

Attention = Literal["flash", "eager"]


class Saved(NamedTuple):
    """A tensor that is kept.

    Attributes:
        what: Its content, in words.
        where: How tensor ranks divide it.
        width: Values of a row.
        size: Bytes of a value.
    """

    what: str
    where: Where
    width: float
    size: int

    def bytes(self, tensor: int, sequence_parallel: bool) -> float:
        """Bytes of a row on one of `tensor` tensor ranks."""
        divided = self.where == "columns" or (self.where == "rows" and sequence_parallel)
        return self.width * self.size / (tensor if divided else 1)


@dataclass(frozen=True)
class Pass:
    """How a layer is computed.

    Attributes:
        size: Bytes of a value that products take and give.
        length: Tokens of a sequence.
        device: `cuda` or `cpu`, whose kernels keep different tensors.
        gpu: The GPU, on `cuda`.
    """

    size: int
    length: int
    device: str = "cuda"
    gpu: Gpu = Gpu()  # noqa: RUF009  (frozen)


def total(saved: Iterable[Saved], tensor: int = 1, sequence_parallel: bool = False) -> float:
    """Bytes of a row on one of `tensor` tensor ranks."""
    return sum(one.bytes(tensor, sequence_parallel) for one in saved)
