"""For which base memory LLMem selects what its Table 3 publishes: exactly, by the places where a choice can change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from benchmarks.papers.decision import OFFLOAD, Layout, layouts, select
from benchmarks.papers.llmem import LLMem

LIMIT = 16384 << 20
GPUS = 4
LENGTH = 512

Range = tuple[int, int]
"""Bytes, both ends included."""


class Choices:
    """What is selected for one model, by the base memory.

    Args:
        forms: Of the model, with a base memory of 0.
    """

    def __init__(self, forms: LLMem) -> None:
        self.peaks = {layout: _within(forms, layout) for layout in layouts(GPUS)}

    def largest(self, layout: Layout, base: int) -> int:
        """Sequences on each GPU that fit."""
        return bisect_right(self.peaks[layout], LIMIT - base)

    def at(self, base: int) -> str:
        """The method's name."""
        found = select([(layout, self.largest(layout, base)) for layout in self.peaks])
        return found.name if found else OFFLOAD

    def ranges(self, wanted: str) -> list[Range]:
        """All base memories for which a method is selected."""
        edges = {LIMIT - peak + 1 for peaks in self.peaks.values() for peak in peaks}
        places = sorted({0, *edges, LIMIT + 1})
        return _joined([(low, high - 1) for low, high in pairwise(places) if self.at(low) == wanted])


def common(ranges: Sequence[Sequence[Range]]) -> list[Range]:
    """What lies in one range of each list."""
    found: list[Range] = [(0, LIMIT)]
    for more in ranges:
        met = [(max(a, c), min(b, d)) for a, b in found for c, d in more]
        found = [(low, high) for low, high in met if low <= high]
    return _joined(sorted(found))


def published(choices: Mapping[str, Choices], table: Mapping[str, str]) -> list[Range]:
    """All base memories for which every model's published choice comes out."""
    return common([choices[name].ranges(wanted) for name, wanted in table.items()])


def _within(forms: LLMem, layout: Layout) -> list[int]:
    """Peaks of 1, 2, ... sequences, up to the limit."""
    peaks: list[int] = []
    while (peak := forms.peak(layout, len(peaks) + 1)) <= LIMIT:
        peaks.append(peak)
    return peaks


def _joined(ranges: Sequence[Range]) -> list[Range]:
    found: list[Range] = []
    for low, high in ranges:
        if found and found[-1][1] + 1 == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found
