"""What bytes of a micro-batch depend on: its rows by task, and a few counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

COUNTS = ("one", "labels", "labels of a chunk", "sequences", "squares", "copied")
"""Features of a micro-batch besides the rows of each signature, which follow them."""


@dataclass(frozen=True)
class Contents:
    """B micro-batches of tasks of K signatures.

    Attributes:
        rows: `[B, K]` tokens of each signature's tasks.
        labels: `[B]` labelled tokens.
        sequences: `[B]` their number.
        squares: `[B]` the sum of squared lengths.
        copied: `[B]` rows of keys and values from earlier chunks, or left for later ones.
    """

    rows: Array
    labels: Array
    sequences: Array
    squares: Array
    copied: Array

    def features(self, chunk: int) -> Array:
        """`[B, 6 + K]`: `COUNTS`, then rows.

        Args:
            chunk: Rows whose logits are computed at once.
        """
        counts = (
            np.ones(len(self.rows)),
            self.labels,
            np.minimum(self.labels, chunk),
            self.sequences,
            self.squares,
            self.copied,
        )
        return np.concatenate([np.stack(counts, axis=1), self.rows], axis=1)
