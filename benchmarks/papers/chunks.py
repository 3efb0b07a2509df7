"""The chunk size that wastes least memory, as PatrickStar's chunk-based memory management searches for it.

Parameters are laid into chunks of one size in the order of the modules, a parameter never divided: what a chunk cannot
take starts the next, and the rest of the full one is wasted (Fang et al., 2022, cited by LLMem's section 4.1; the
search's bounds are those of Colossal-AI's Gemini, with which LLMem was measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ChunkSearch:
    """Which sizes are tried, all in values (not bytes)."""

    least: int = 32 << 20
    """No chunk is smaller, unless the whole model is: then one chunk holds it exactly."""
    width: int = 32 << 20
    """Sizes are tried up to so much above the smallest that can serve."""
    step: int = 1024
    """Sizes are multiples of it."""

    def best(self, counts: Sequence[int]) -> int:
        """The size of a chunk, in values.

        Args:
            counts: Values of each parameter, in order. (LLMem's formula keeps the token embedding out of the chunks.)

        Returns:
            The smallest of the sizes that waste least. Every parameter fits into a chunk.
        """
        total = sum(counts)
        if total <= self.least:
            return max(total, 1)
        first = -(-max(self.least, *counts) // self.step) * self.step
        sizes = np.arange(first, first + self.width + 1, self.step, dtype=np.int64)
        return int(sizes[np.argmin(wasted(counts, sizes))])


def wasted(counts: Sequence[int], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Values that stay empty in chunks of each of several sizes, the end of the last chunk included.

    Args:
        counts: Values of each parameter, none larger than any of the sizes.
        sizes: Sizes of a chunk.
    """
    free = np.zeros_like(sizes)
    waste = np.zeros_like(sizes)
    for count in counts:
        full = count > free
        waste += np.where(full, free, 0)
        free = np.where(full, sizes, free) - count
    return waste + free
