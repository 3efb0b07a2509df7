"""The largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable

MAX_SEQUENCES = 1 << 40


def largest_batch(fits: Callable[[int], bool], low: int = 0, high: int | None = None) -> int:
    """Find the largest batch that fits, by bisection; 0 if there is none.

    Args:
        fits: Whether a batch fits; if one does, so do all smaller ones.
        low: A batch that fits, or 0.
        high: A batch that does not fit; None doubles batches until one does not.
    """
    if high is None:
        high = max(1, 2 * low)
        while high < MAX_SEQUENCES and fits(high):
            low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
