"""How the sequences of a step are shared out over data-parallel ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def share_out(
    items: Sequence[Item], lengths: Sequence[int], groups: Sequence[int], parts: int
) -> list[list[Item]]:
    """Split items into parts of nearly equal length, each group spread evenly.

    Longest first, each to the part with the fewest tokens that still has room for its group: a part takes at most
    `ceil(group size / parts)` items of a group, so that accumulation bounds memory as a user expects. Deterministic.

    Args:
        items: What to share out (sequences).
        lengths: Tokens of each.
        groups: Group (task) of each.
        parts: Number of parts.

    Returns:
        `parts` lists, items in their original order; some may be empty.
    """
    sizes: dict[int, int] = {}
    for group in groups:
        sizes[group] = sizes.get(group, 0) + 1
    room = [{group: math.ceil(size / parts) for group, size in sizes.items()} for _ in range(parts)]
    filled = [0] * parts
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(items)), key=lambda i: (-lengths[i], i)):
        part = min((p for p in range(parts) if room[p][groups[i]] > 0), key=lambda p: (filled[p], p))
        room[part][groups[i]] -= 1
        filled[part] += lengths[i]
        chosen[part].append(i)
    return [[items[i] for i in sorted(indices)] for indices in chosen]
