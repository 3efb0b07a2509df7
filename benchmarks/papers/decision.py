"""Which parallel method to train with: LLMem's Algorithm 1 over estimates of each method's peak memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OFFLOAD = "offload"
"""What is selected when no method fits: parameters on the GPU, optimizer and its states in host memory."""
_COMMUNICATION_OF_ZERO3 = 1.5
"""ZeRO-3 communicates so many times what plain data parallelism does (section 6)."""


@dataclass(frozen=True)
class Layout:
    """A way to divide GPUs."""

    kind: str
    """`CDP` (conventional data parallelism), `ADP` (advanced: ZeRO-3), `TP` (one-dimensional), `DP+TP`."""
    data: int
    tensor: int

    @property
    def gpus(self) -> int:
        """How many GPUs it takes."""
        return self.data * self.tensor

    @property
    def name(self) -> str:
        """As LLMem's Table 3 has it. It calls both kinds of data parallelism `4DP`; `kind` tells them apart."""
        if self.kind == "DP+TP":
            return f"{self.data}DP+{self.tensor}TP"
        return f"{self.tensor}TP" if self.kind == "TP" else f"{self.data}DP"

    def score(self, batch: int) -> float:
        """What it is ranked by: sequences of a step on all GPUs, those of CDP worth half as much again.

        Args:
            batch: Sequences of a step on each GPU.
        """
        return batch * self.data * (_COMMUNICATION_OF_ZERO3 if self.kind == "CDP" else 1.0)


def layouts(gpus: int) -> list[Layout]:
    """The methods for a number of GPUs, in the order in which they win ties.

    The paper has one combination of DP and TP, on four GPUs. On more, every one is listed, the least tensor-parallel
    first. On one GPU there is one method.
    """
    found = [Layout("CDP", gpus, 1)]
    if gpus > 1:
        found += [Layout("ADP", gpus, 1), Layout("TP", 1, gpus), *_combined(gpus)]
    return found


def _combined(gpus: int) -> Iterator[Layout]:
    for tensor in range(2, gpus // 2 + 1):
        if gpus % tensor == 0:
            yield Layout("DP+TP", gpus // tensor, tensor)


def select(batches: Sequence[tuple[Layout, int]]) -> Layout | None:
    """The layout with the highest score, the first of equals; None if nothing fits.

    Args:
        batches: Layouts in the order in which they win ties, each with its largest batch.
    """
    best = max(batches, key=lambda entry: entry[0].score(entry[1]))
    return best[0] if best[1] else None
