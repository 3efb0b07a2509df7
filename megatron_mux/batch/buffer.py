"""Named arrays in one buffer, which goes to a device in a single copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_ALIGNMENT = 16
"""Bytes. Every tensor begins at a multiple: kernels load 16 bytes at once, and Triton compiles for it once."""


@dataclass(frozen=True)
class Buffer:
    """Arrays of one dimension: those of 64 bits, then those of 32, each aligned.

    Attributes:
        data: `[n]` uint8.
        wide, narrow: The length of each array of 64 and of 32 bits.
    """

    data: Array
    wide: Mapping[str, int]
    narrow: Mapping[str, int]

    @classmethod
    def of(cls, wide: Mapping[str, Array], narrow: Mapping[str, Array]) -> Buffer:
        """A buffer of arrays that become int64, and of some that become int32; of floats the bits, as integers."""
        sizes = [8 * size for size in _padded(map(len, wide.values()), 8)]
        sizes += [4 * size for size in _padded(map(len, narrow.values()), 4)]
        buffer = np.empty(sum(sizes), np.uint8)
        starts = accumulate(sizes, initial=0)
        for arrays, dtype in ((wide, np.dtype(np.int64)), (narrow, np.dtype(np.int32))):
            for array in arrays.values():
                start = next(starts)
                buffer[start : start + array.size * dtype.itemsize].view(dtype)[:] = array
                next(starts)  # of the padding
        return cls(buffer, *({name: len(own) for name, own in arrays.items()} for arrays in (wide, narrow)))

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The arrays, int64 and int32, as views of `data` or of a copy.

        Args:
            whole: `[n]` uint8.
        """
        wide, narrow = _padded(self.wide.values(), 8), _padded(self.narrow.values(), 4)
        end = 8 * sum(wide)
        tensors = whole[:end].view(torch.int64).split(wide)[::2]
        tensors += whole[end:].view(torch.int32).split(narrow)[::2]
        return dict(zip((*self.wide, *self.narrow), tensors, strict=True))


def _padded(lengths: Iterable[int], size: int) -> list[int]:
    """Items of `size` bytes: of each array, and of the padding after it."""
    return [items for length in lengths for items in (length, -length % (_ALIGNMENT // size))]
