"""What bytes of a micro-batch depend on: its rows by task, and a few counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

ATTENTION = ("pairs", "padding", "block", "long", "joined", "joined long", "masked")
"""Features of a CPU's attention, which pads short sequences and keeps the weights of their pairs of tokens: these
pairs, rows of padding, the most pairs that are computed at once, rows of sequences too long for that; then all rows,
and long ones, if several calls compute the micro-batch: their outputs are copied; and pairs of the masks of sequences
with a prefix or earlier chunks."""
COUNTS = ("one", "labels of a chunk", "sequences", "copied", *ATTENTION)
"""Features of a micro-batch before those of each signature: its rows, then its labelled rows."""


@dataclass(frozen=True)
class Contents:
    """B micro-batches of tasks of K signatures.

    Attributes:
        rows: `[B, K]` tokens of each signature's tasks.
        labels: `[B, K]` labelled ones of them: above the last layer's attention only these are computed.
        sequences: `[B]` their number.
        copied: `[B]` rows of keys and values from earlier chunks, or left for later ones.
        attention: `[B, 7]` see `ATTENTION`; zeros on a GPU.
    """

    rows: Array
    labels: Array
    sequences: Array
    copied: Array
    attention: Array

    def features(self, chunk: int) -> Array:
        """`[B, 11 + 2 K]`: `COUNTS`, then rows and labels of each signature.

        Args:
            chunk: Rows whose logits are computed at once.
        """
        counts = (
            np.ones(len(self.rows)),
            np.minimum(self.labels.sum(axis=1), chunk),
            self.sequences,
            self.copied,
        )
        return np.concatenate([np.stack(counts, axis=1), self.attention, self.rows, self.labels], axis=1)

    def of(self, chosen: npt.NDArray[np.int64]) -> Contents:
        """Only these micro-batches."""
        return Contents(*(own[chosen] for own in vars(self).values()))

    def moved(self, onto: Sequence[int]) -> Contents:
        """Rows of each signature as if they were of another."""
        rows, labels = (np.zeros_like(self.rows) for _ in range(2))
        for old, new in enumerate(onto):
            rows[:, new] += self.rows[:, old]
            labels[:, new] += self.labels[:, old]
        return replace(self, rows=rows, labels=labels)

    def only(self, signatures: tuple[int, ...]) -> Contents:
        """Only the rows of these signatures."""
        columns = list(signatures)
        return replace(self, rows=self.rows[:, columns], labels=self.labels[:, columns])
