"""Stand-ins of a dry run: a data set of which only lengths are known, and random bits that nobody reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatron_mux.data.tokenise import Example


class LengthsOnlyDataset:
    """Replaces a `TaskDataset`: every token is 0, the last ones of each record are labelled.

    Args:
        labels: Labelled tokens of each, at its end.
    """

    distinct_completions = None
    end_of_sequence = 0
    dropped = 0
    path = Path("dry-run")

    def __init__(self, lengths: Sequence[int], labels: Sequence[int]) -> None:
        self.lengths: npt.NDArray[np.int32] = np.array(lengths, np.int32)
        self.label_counts: npt.NDArray[np.int32] = np.array(labels, np.int32)

        # Of a preference: every other sequence is the worse one.
        self.completion_counts = self.label_counts
        self.starts = self.lengths - self.label_counts
        self.desirable = np.arange(len(self.lengths)) % 2 == 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Example:
        length, labels = int(self.lengths[number]), int(self.label_counts[number])
        return Example(np.zeros(length, np.int64), np.arange(length) >= length - labels, None)

    def mismatched(self, prompt: int, completion: int) -> Example:
        """As long as the sequence itself."""
        return self[prompt]

    def candidates(self, number: int) -> tuple[list[Example], int]:
        """None of them is to be classified."""
        return [self[number]], 0


def fewer_bits_(x: torch.Tensor) -> torch.Tensor:
    """Replaces `kernels.dropout._mix_`: one of its rounds takes the memory of all, in a quarter of the operators."""
    x ^= (x >> 16) & 0xFFFF
    return x
