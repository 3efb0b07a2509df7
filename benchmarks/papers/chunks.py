"""Searches for the chunk size that wastes the least memory, as PatrickStar's chunk-based memory management does.

Parameters fill chunks of equal size in the order of the modules. A parameter is never split: if it does not fit into
the current chunk, it starts the next one, and the rest of the current chunk is wasted (Fang et al., 2022, cited by
LLMem's section 4.1). The bounds of the search are those of Colossal-AI's Gemini, with which LLMem was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ChunkSearch:
    """The chunk sizes to try, in values (not bytes)."""

    least: int = 32 << 20
    """Smallest chunk size. A smaller model gets one chunk of exactly its size."""
    width: int = 32 << 20
    """Range of sizes to try above the smallest possible one."""
    step: int = 1024
    """Sizes are multiples of this number."""

    def best(self, counts: Sequence[int]) -> int:
        """Return the chunk size that wastes the fewest values, the smallest of equals.

        Every parameter fits into a chunk of this size.

        Args:
            counts: Values of each parameter, in order. (LLMem's formula keeps the token embedding out of the chunks.)
        """
        total = sum(counts)
        if total <= self.least:
            return max(total, 1)
        first = -(-max(self.least, *counts) // self.step) * self.step
        sizes = np.arange(first, first + self.width + 1, self.step, dtype=np.int64)
        return int(sizes[np.argmin(wasted(counts, sizes))])


def wasted(counts: Sequence[int], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count the unused values of all chunks, including the last one, for each chunk size.

    Args:
        counts: Values of each parameter; none exceeds the smallest size.
        sizes: Chunk sizes.
    """
    free = np.zeros_like(sizes)
    waste = np.zeros_like(sizes)
    for count in counts:
        full = count > free
        waste += np.where(full, free, 0)
        free = np.where(full, sizes, free) - count
    return waste + free
