"""The order of a mixture's records: that of `datasets.interleave_datasets`, for any version of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BLOCK = 1000  # sources that `datasets` draws together


@dataclass(frozen=True)
class Mixing:
    """How sources are mixed.

    Attributes:
        weights: Of the sources; None: they take turns.
        all_exhausted: Go on until every record of every source has come, those of smaller sources repeatedly; otherwise
            until the first source is used up.
        seed: Decides which source comes next.
    """

    weights: tuple[float, ...] | None = None
    all_exhausted: bool = False
    seed: int = 0

    def order(self, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
        """The records of an epoch, as numbers in the sources laid end to end.

        Args:
            sizes: Records of each source, at least one.
        """
        count = np.array(sizes, np.int64)
        starts = np.cumsum(count) - count
        if self.weights is None:
            rounds = count.max() if self.all_exhausted else count.min()
            order: npt.NDArray[np.int64] = (np.arange(rounds)[:, None] % count + starts).ravel()
            return order
        drawn = self._draws(count)
        order = np.empty(len(drawn), np.int64)
        for source in range(len(count)):
            places = np.flatnonzero(drawn == source)
            order[places] = np.arange(len(places)) % count[source] + starts[source]
        return order

    def _draws(self, count: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The source of each record."""
        weights = np.array(self.weights, np.float64)
        random = np.random.default_rng(self.seed)
        blocks, drawn = [], np.zeros(len(count), np.int64)
        enough = np.all if self.all_exhausted else np.any
        while not enough(drawn >= count):
            blocks.append(random.choice(len(count), size=_BLOCK, p=weights / weights.sum()))
            drawn += np.bincount(blocks[-1], minlength=len(count))
        draws = np.concatenate(blocks)
        used_up = [np.flatnonzero(draws == i)[n - 1] for i, n in enumerate(count) if drawn[i] >= n]
        found: npt.NDArray[np.int64] = draws[: (max(used_up) if self.all_exhausted else min(used_up)) + 1]
        return found
