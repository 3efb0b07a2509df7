"""LLMem's Algorithm 1: selects a parallel method from estimates of each method's peak memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OFFLOAD = "offload"
"""Selected when no method fits: parameters on the GPU, the optimizer and its states in host memory."""
_COMMUNICATION_OF_ZERO3 = 1.5
"""Communication volume of ZeRO-3 over that of plain data parallelism (section 6)."""


@dataclass(frozen=True)
class Layout:
    """A way to divide GPUs."""

    kind: str
    """`CDP` (conventional data parallelism), `ADP` (advanced: ZeRO-3), `TP` (one-dimensional), `DP+TP`."""
    data: int
    tensor: int

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.data * self.tensor

    @property
    def name(self) -> str:
        """Name as in LLMem's Table 3, which calls both kinds of data parallelism `4DP`; `kind` distinguishes them."""
        if self.kind == "DP+TP":
            return f"{self.data}DP+{self.tensor}TP"
        return f"{self.tensor}TP" if self.kind == "TP" else f"{self.data}DP"

    def score(self, batch: int) -> float:
        """Score by which layouts are ranked: sequences in a step on all GPUs, times 1.5 for CDP.

        Args:
            batch: Sequences of a step on each GPU.
        """
        return batch * self.data * (_COMMUNICATION_OF_ZERO3 if self.kind == "CDP" else 1.0)


def layouts(gpus: int) -> list[Layout]:
    """List the layouts of a number of GPUs; the first of equal scores wins.

    The paper has one combination of DP and TP, on four GPUs. For more GPUs all combinations are listed, those with the
    fewest tensor ranks first. For one GPU there is one layout.
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
    """Select the layout with the highest score, the first of equals; None if none fits.

    Args:
        batches: Layouts with their largest batch, in the order of `layouts`.
    """
    best = max(batches, key=lambda entry: entry[0].score(entry[1]))
    return best[0] if best[1] else None
