"""INT8 and FP8 (e4m3) weights: a byte for each value, scales for rows or for blocks of values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from megatron_mux.kernels.dequantise.interface import DequantiseKernels, EightBitCodes
from megatron_mux.quantised.matrix import QuantisedMatrix

Format = Literal["int8", "fp8"]

_LARGEST_FP8 = 448.0
_TINY = torch.finfo(torch.float32).eps
"""Scale of a row of zeros."""


def quantise(chunks: Iterable[Tensor], to: Format) -> EightBitMatrix:
    """Quantise a whole Hugging Face tensor, with one scale for each row, as torchao does."""
    codes, scales = [], []
    for chunk in chunks:
        values = chunk.float()
        absmax = values.abs().amax(dim=1, keepdim=True)
        # On a GPU, torch would multiply with the reciprocal of a Python number: other bits than on a CPU.
        largest = torch.tensor(127.5 if to == "int8" else _LARGEST_FP8, device=values.device)
        scale = (absmax / largest).clamp(min=_TINY)
        if to == "int8":
            codes.append((values * (1 / scale)).round().clamp(-128, 127).to(torch.int8))
        else:
            codes.append((values / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn))
        scales.append(scale)
    return EightBitMatrix.of(torch.cat([one.view(torch.uint8) for one in codes]), torch.cat(scales), to)


class EightBitMatrix(QuantisedMatrix):
    """A matrix in 8 bits. See `QuantisedMatrix`.

    Row-wise are `codes`, as bytes, and `scales`, one for each block of values of a row, or one for all of it.
    """

    stored: ClassVar[torch.dtype]
    """What the bytes of the codes are."""

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, to: Format) -> EightBitMatrix:
        """A whole Hugging Face tensor.

        Args:
            codes: `[N, K]` uint8: the bytes of the values.
            scales: `[N, blocks]` fp32.
            to: What the bytes are.
        """
        kind: type[EightBitMatrix] = Int8Matrix if to == "int8" else Fp8Matrix
        return kind({"codes": codes, "scales": scales}, {}, codes.shape[1])

    @classmethod
    def empty(cls, rows: int, columns: int, blocks: int, to: Format) -> EightBitMatrix:
        """A matrix whose contents are undefined; it has so many scales in a row."""
        return cls.of(torch.empty(rows, columns, dtype=torch.uint8), torch.empty(rows, blocks), to)

    @property
    def block(self) -> int:
        """See `QuantisedMatrix`."""
        blocks = self.rowwise["scales"].shape[1]
        return 1 if blocks == 1 else self.columns // blocks

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """See `QuantisedMatrix`."""
        together = {name: torch.cat([part.rowwise[name] for part in parts]) for name in parts[0].rowwise}
        return parts[0]._with(together, parts[0].shared, parts[0].columns)

    def _cut(self, columns: range) -> dict[str, Tensor]:
        scales = self.rowwise["scales"]
        if scales.shape[1] > 1:
            scales = scales[:, columns.start // self.block : columns.stop // self.block]
        codes = self.rowwise["codes"][:, columns.start : columns.stop]
        return {"codes": codes.contiguous(), "scales": scales.contiguous()}

    def _fill(self, rows: slice, values: Tensor) -> None:
        values.copy_(self.rowwise["codes"][rows].view(self.stored))
        scales = self.rowwise["scales"][rows]
        values.view(*scales.shape, -1).mul_(scales[:, :, None])

    def _launch(self, kernels: type[DequantiseKernels], place: Tensor, counts: Tensor | None) -> None:
        floating = self.stored.is_floating_point
        codes = EightBitCodes(self.rowwise["codes"], self.rowwise["scales"], floating)
        kernels.eight_bit(place, codes, counts)


class Int8Matrix(EightBitMatrix):
    """Signed integers times scales."""

    stored = torch.int8


class Fp8Matrix(EightBitMatrix):
    """e4m3 numbers times scales."""

    stored = torch.float8_e4m3fn
