"""Which records make up a step: a pure function of the step, so that a resume is exact without any saved state."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Sampler:
    """Divides epochs into batches.

    An epoch is one pass over all records, in the file's order or in a permutation drawn from the seed and the epoch's
    number; its last batch may be short. Batches never span epochs.

    Args:
        num_records: Records of the data set.
        batch_size: Sequences of one optimizer step.
        seed: The task's seed.
        shuffle: Permute each epoch.
        together: Neighbours in the data set that stay neighbours in an epoch: the sequences of a preference record.
    """

    def __init__(
        self, num_records: int, batch_size: int, seed: int, shuffle: bool = True, together: int = 1
    ) -> None:
        if num_records < 1 or batch_size < 1:
            raise ValueError(f"a sampler needs records and a batch size, got {num_records} and {batch_size}")
        self.num_records = num_records
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.together = together
        # Only a cache: the order is a function of seed and epoch. Replaced at once, since threads share it.
        self._epoch: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, the short one included."""
        return -(-self.num_records // self.batch_size)

    def batch(self, step: int) -> list[int]:
        """The records of optimizer step `step` (from 0), as indices into the data set."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.batch_size
        stop = min(start + self.batch_size, self.num_records)
        if not self.shuffle:
            return list(range(start, stop))
        known, order = self._epoch
        if known != epoch:
            units = permutation(self.num_records // self.together, self.seed, epoch)
            order = (units[:, None] * self.together + np.arange(self.together)).ravel()
            self._epoch = (epoch, order)
        chosen: list[int] = order[start:stop].tolist()
        return chosen


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of an epoch: `[count]` int64.

    Records are sorted by a hash of (seed, epoch, record), in integer arithmetic alone: unlike a library's generator,
    it gives the same order in every version, so a run may be resumed after an upgrade.
    """
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.uint64(seed % 2**64) + _GOLDEN) ^ np.uint64(epoch))
        hashes = _mix(key ^ _mix(np.arange(count, dtype=np.uint64) * _GOLDEN + key))
    return np.argsort(hashes).astype(
        np.int64, copy=False
    )  # they all differ: any way to sort gives this order


def _mix(x: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection in which every bit of the input stirs every bit of the output."""
    x = np.asarray(x, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
