"""The largest batch that fits, by few questions."""

from __future__ import annotations

from collections.abc import Callable

MAX_SEQUENCES = 1 << 40


def largest_batch(peak: Callable[[int], int], limit: int) -> int:
    """Find the largest batch whose peak is within the limit; 0 if there is none.

    Args:
        peak: Bytes at the peak of a batch, which never falls as the batch grows.
        limit: Bytes available.
    """
    if peak(1) > limit:
        return 0
    low, high = 1, 2
    while high < MAX_SEQUENCES and peak(high) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if peak(middle) <= limit:
            low = middle
        else:
            high = middle
    return low
