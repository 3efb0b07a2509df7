"""What cutting records to a maximum length loses, and what is left of them."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Cut:
    """What is lost by cutting records to a maximum length.

    Attributes:
        records: All records.
        longer: Those that are longer than that.
        empty: Those that have no label even uncut.
        emptied: Those that have no label left.
        labels: Labels of all records, uncut.
        lost: Labels that are cut off.
        notes: Lines for people about rows that are no records here, and about what is left out of others.
    """

    records: int = 0
    longer: int = 0
    empty: int = 0
    emptied: int = 0
    labels: int = 0
    lost: int = 0
    notes: tuple[str, ...] = ()

    def lines(self, max_length: int) -> list[str]:
        """Say what was lost, in lines for people; none if nothing was."""
        found = []
        if self.longer:
            share = f"{self.lost:,} of {self.labels:,} tokens to learn" if self.lost else "no token to learn"
            emptied = f", {self.emptied:,} records all of theirs: these were dropped" if self.emptied else ""
            warning = "warning: " if 2 * self.lost > self.labels or 2 * self.emptied > self.records else ""
            advice = ": raise max_length" if warning else ""
            found.append(
                f"{warning}{self.longer:,} of {self.records:,} records are longer than {max_length} tokens; cutting "
                f"them loses {share}{emptied}{advice}"
            )
        if self.empty:
            found.append(
                f"{self.empty:,} of {self.records:,} records have no token to learn and were dropped"
            )
        return [*found, *self.notes]

    def __add__(self, other: Cut) -> Cut:
        """Both together."""
        return Cut(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, eq=False)
class Usable:
    """The records of an entry that have a label within the tokens that are left after a cut.

    Attributes:
        numbers: `[n]` int64, in the entry.
        lengths, label_counts: `[n]` int32, tokens and labels of each after the cut.
        cut: What was lost.
    """

    numbers: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    label_counts: npt.NDArray[np.int32]
    cut: Cut
