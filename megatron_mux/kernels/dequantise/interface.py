"""Kernels that dequantise a whole matrix on a GPU. Without them, the loops of `quantised` do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

LAUNCHES: Mapping[str, int] = {"nf4": 1, "eight_bit": 1}
"""Device launches of each operation of `DequantiseKernels`, whatever the size of the matrix."""


class Nf4Codes(NamedTuple):
    """A matrix `[N, K]` in NF4, K a multiple of 64. See `quantised.nf4.Nf4Matrix`.

    Attributes:
        packed: `[N, K / 2]` uint8.
        absmax: `[N, K / 64]` fp32; uint8 with double quantisation.
        codebook: `[16]` fp32.
        first: `[N, 1]` int32; None without double quantisation, like the others.
        scales, offsets: `[blocks of scales]` fp32.
        nested_codebook: `[256]` fp32.
    """

    packed: Tensor
    absmax: Tensor
    codebook: Tensor
    first: Tensor | None = None
    scales: Tensor | None = None
    offsets: Tensor | None = None
    nested_codebook: Tensor | None = None


class EightBitCodes(NamedTuple):
    """A matrix `[N, K]` in 8 bits. See `quantised.eight_bit.EightBitMatrix`.

    Attributes:
        codes: `[N, K]` uint8.
        scales: `[N, blocks]` fp32.
        floating: Whether the bytes are e4m3 numbers, not signed integers.
    """

    codes: Tensor
    scales: Tensor
    floating: bool


class DequantiseKernels(ABC):
    """Kernels for GPUs. All tensors are contiguous and on the GPU."""

    @staticmethod
    @abstractmethod
    def nf4(place: Tensor, codes: Nf4Codes, rounded_to: torch.dtype | None, counts: Tensor | None) -> None:
        """Write the values of a matrix in NF4.

        Args:
            place: `[N, K]`, of any floating-point dtype.
            rounded_to: The dtype to which values are rounded before they become the place's; None: none.
            counts: `[experts]` int32 or int64 on the device, rows that go to each expert, if the matrix holds the
                rows of several, one after the other: a place whose expert has no rows is left as it is. None: all
                of the matrix is dequantised.
        """

    @staticmethod
    @abstractmethod
    def eight_bit(place: Tensor, codes: EightBitCodes, counts: Tensor | None) -> None:
        """Write the values of a matrix in 8 bits; see `nf4`."""
