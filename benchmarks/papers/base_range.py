"""Finds the exact ranges of base memory for which LLMem's algorithm selects what its Table 3 publishes."""

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
"""First and last number of bytes, both included."""


class Choices:
    """The methods selected for one model, as a function of the base memory.

    Args:
        forms: LLMem's closed forms for the model, with a base memory of 0.
    """

    def __init__(self, forms: LLMem) -> None:
        self.peaks = {layout: _peaks_within_limit(forms, layout) for layout in layouts(GPUS)}

    def largest(self, layout: Layout, base: int) -> int:
        """Return the largest batch per GPU that fits, given the base memory in bytes."""
        return bisect_right(self.peaks[layout], LIMIT - base)

    def selected_method(self, base: int) -> str:
        """Return the name of the method that is selected, given the base memory in bytes."""
        found = select([(layout, self.largest(layout, base)) for layout in self.peaks])
        return found.name if found else OFFLOAD

    def ranges(self, wanted: str) -> list[Range]:
        """Return all base memories for which a method is selected."""
        edges = {LIMIT - peak + 1 for peaks in self.peaks.values() for peak in peaks}
        places = sorted({0, *edges, LIMIT + 1})
        return _merge_adjacent(
            [(low, high - 1) for low, high in pairwise(places) if self.selected_method(low) == wanted]
        )


def intersection(ranges: Sequence[Sequence[Range]]) -> list[Range]:
    """Intersect several lists of ranges."""
    found: list[Range] = [(0, LIMIT)]
    for more in ranges:
        met = [(max(a, c), min(b, d)) for a, b in found for c, d in more]
        found = [(low, high) for low, high in met if low <= high]
    return _merge_adjacent(sorted(found))


def ranges_of_table(choices: Mapping[str, Choices], table: Mapping[str, str]) -> list[Range]:
    """Return all base memories for which every model's published method is selected."""
    return intersection([choices[name].ranges(wanted) for name, wanted in table.items()])


def _peaks_within_limit(forms: LLMem, layout: Layout) -> list[int]:
    """Return the peaks of batches of 1, 2, ... sequences, as long as they are within the limit."""
    peaks: list[int] = []
    while (peak := forms.peak(layout, len(peaks) + 1)) <= LIMIT:
        peaks.append(peak)
    return peaks


def _merge_adjacent(ranges: Sequence[Range]) -> list[Range]:
    found: list[Range] = []
    for low, high in ranges:
        if found and found[-1][1] + 1 == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found
