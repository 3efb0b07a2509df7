"""Records in memory, for tests and benchmarks: made up, no file behind them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_mux.data.dataset import Example, TaskDataset

if TYPE_CHECKING:  # it imports transformers, which not every benchmark needs
    from .loop import Example as Pair


@dataclass
class Records:
    """Records in memory that the engine takes for a `TaskDataset`.

    Attributes:
        pairs: Token ids and labels of each. They may be replaced; single ones only until the engine has seen them.
        distinct_completions, end_of_sequence, dropped, path: See `TaskDataset`.
    """

    pairs: list[Pair]
    distinct_completions: None = None
    end_of_sequence: int = 0
    dropped: int = 0
    path: Path = Path("memory")

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Example:
        tokens, labelled = self.pairs[index]
        return Example(tokens.numpy(), labelled.numpy(), None)

    def candidates(self, index: int) -> tuple[list[Example], int]:
        """None of them is to be classified."""
        return [self[index]], 0

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "pairs":  # what was counted is of those before
            self.__dict__.pop("lengths", None)
            self.__dict__.pop("label_counts", None)

    # Counted once: the engine asks for every task in every step, and a benchmark's clock runs meanwhile.

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """As the index of a file."""
        return np.array([len(tokens) for tokens, _ in self.pairs], np.int32)

    @cached_property
    def label_counts(self) -> npt.NDArray[np.int32]:
        """As the index of a file."""
        return np.array([int(labelled[1:].sum()) for _, labelled in self.pairs], np.int32)

    def as_dataset(self) -> TaskDataset:
        """The same object under the type that the engine names."""
        return self  # type: ignore[return-value]
