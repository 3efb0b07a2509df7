"""NF4 with or without double quantisation (Dettmers et al., 2023, section 3), bit-equal to bitsandbytes.

A block of 64 neighbouring values has a scale, its largest absolute value; a value's code is the nearest of 16 numbers.
Double quantisation holds the scales, less their mean, as 8-bit codes in blocks of 256 with a scale each. These blocks
are of the whole Hugging Face tensor, so a rank's part also holds the place of its scales among all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

from megatron_mux.kernels.dequantise.interface import DequantiseKernels, Nf4Codes
from megatron_mux.quantised.matrix import QuantisedMatrix

BLOCK = 64
"""Values that share a scale."""
NESTED_BLOCK = 256
"""Scales that share a scale of their own."""

_NORMAL_QUANTILES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_TINY = 1e-38
"""Takes the place of a scale of zero."""
_HALF_TABLE = 65535 / 2


def codebook() -> Tensor:
    """`[16]` the numbers that codes stand for."""
    return torch.tensor(_NORMAL_QUANTILES)


def nested_codebook() -> Tensor:
    """`[256]` the numbers that codes of scales stand for: seven decades, finest near 1, of both signs; 0 and 1."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(numbers))


def quantise(chunks: Iterable[Tensor], double: bool = True, on_gpu: bool = False) -> Nf4Matrix:
    """Quantise a whole Hugging Face tensor.

    Args:
        chunks: Its rows, some at a time: `[n, K]`, K a multiple of 64, on any device.
        double: Whether scales are quantised, too.
        on_gpu: Whether scales get the codes that bitsandbytes gives them on a GPU, not on a CPU.
    """
    codes, scales = zip(*map(_quantise_rows, chunks), strict=True)
    packed, absmax = torch.cat(codes), torch.cat(scales)
    if not double:
        return Nf4Matrix.of(packed, absmax)
    # On the CPU on any device: where sums begin decides about their last bits.
    offset = absmax.flatten().cpu().mean().to(absmax.device)
    nested, nested_absmax = _quantise_scales((absmax - offset).flatten(), on_gpu)
    return Nf4Matrix.of(packed, nested.view(absmax.shape), nested_absmax, offset)


def _quantise_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes `[n, K / 2]` and scales `[n, K / 64]`."""
    blocks = values.reshape(-1, BLOCK).float()
    absmax = blocks.abs().amax(dim=1)
    codes = _nearest(blocks * (1.0 / absmax.clamp(min=_TINY))[:, None], codebook())
    packed = (codes[:, ::2] << 4) | codes[:, 1::2]
    return packed.view(len(values), -1), absmax.view(len(values), -1)


def _quantise_scales(values: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """Codes of `[n]` values, and the scale of each block of them."""
    blocks = -(-values.shape[0] // NESTED_BLOCK)
    padded = torch.nn.functional.pad(values, (0, blocks * NESTED_BLOCK - values.shape[0]))
    absmax = padded.view(blocks, NESTED_BLOCK).abs().amax(dim=1)
    scaled = padded.view(blocks, NESTED_BLOCK) * (1.0 / absmax.clamp(min=_TINY))[:, None]
    if not exact:  # on a CPU, bitsandbytes looks codes up in a table of 65536 values from -1 to 1
        scaled = ((scaled + 1) * _HALF_TABLE + 0.5).floor() / _HALF_TABLE - 1
    return _nearest(scaled, nested_codebook()).flatten()[: values.shape[0]], absmax


def _nearest(scaled: Tensor, numbers: Tensor) -> Tensor:
    """Index of the nearest of sorted numbers."""
    middles = ((numbers[:-1] + numbers[1:]) / 2).to(scaled.device)
    return torch.bucketize(scaled.clamp(-1, 1), middles, out_int32=True).to(torch.uint8)


class Nf4Matrix(QuantisedMatrix):
    """A matrix in NF4. See `QuantisedMatrix`.

    Row-wise are `codes`, two to a byte, and `absmax`, the scales: in fp32, or as codes. With codes, `first` is the
    number of each row's first scale among all scales of the sources, each source padded to whole blocks of 256;
    `scales` and `offsets` hold a number for each of these blocks.
    """

    unit = BLOCK

    @classmethod
    def of(
        cls,
        codes: Tensor,
        absmax: Tensor,
        scales: Tensor | None = None,
        offset: Tensor | None = None,
        rounded_to: torch.dtype | None = None,
    ) -> Nf4Matrix:
        """A whole Hugging Face tensor.

        Args:
            codes: `[N, K / 2]` uint8.
            absmax: `[N, K / 64]` scales in fp32; or their codes, uint8.
            scales: `[ceil(N * K / 64 / 256)]` fp32 scales of blocks of scales, if these are codes.
            offset: What is added to these scales: a scalar.
            rounded_to: See `QuantisedMatrix`.
        """
        rows, blocks = absmax.shape
        rowwise, shared = {"codes": codes, "absmax": absmax}, {"codebook": codebook().to(codes.device)}
        if scales is not None:
            assert offset is not None
            first = torch.arange(rows, dtype=torch.int32, device=codes.device)[:, None] * blocks
            rowwise["first"] = first
            shared |= {
                "scales": scales,
                "offsets": offset.expand(scales.shape).contiguous(),
                "nested_codebook": nested_codebook().to(codes.device),
            }
        return cls(rowwise, shared, codes.shape[1] * 2, rounded_to)

    @classmethod
    def empty(cls, rows: int, columns: int, source_scales: Sequence[int], double: bool) -> Nf4Matrix:
        """A matrix whose contents are undefined.

        Args:
            rows, columns: N, K.
            source_scales: Number of scales of each Hugging Face tensor that it has rows of.
            double: Whether scales are quantised.
        """
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
        absmax = torch.empty(rows, columns // BLOCK, dtype=torch.uint8 if double else torch.float32)
        if not double:
            return cls.of(codes, absmax)
        blocks = sum(-(-count // NESTED_BLOCK) for count in source_scales)
        return cls.of(codes, absmax, torch.empty(blocks), torch.zeros(()))

    @property
    def block(self) -> int:
        """See `QuantisedMatrix`."""
        return BLOCK

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """See `QuantisedMatrix`."""
        rowwise = {name: [part.rowwise[name] for part in parts] for name in parts[0].rowwise}
        shared = dict(parts[0].shared)
        if "first" in rowwise:
            before = 0
            for i, part in enumerate(parts):
                rowwise["first"][i] = part.rowwise["first"] + before * NESTED_BLOCK
                before += part.shared["scales"].shape[0]
            for name in ("scales", "offsets"):
                shared[name] = torch.cat([part.shared[name] for part in parts])
        together = {name: torch.cat(tensors) for name, tensors in rowwise.items()}
        return parts[0]._with(together, shared, parts[0].columns)

    def _cut(self, columns: range) -> dict[str, Tensor]:
        def part(tensor: Tensor, per_value: int) -> Tensor:
            return tensor[:, columns.start // per_value : columns.stop // per_value].contiguous()

        found = {
            "codes": part(self.rowwise["codes"], 2),
            "absmax": part(self.rowwise["absmax"], BLOCK),
        }
        if "first" in self.rowwise:
            found["first"] = self.rowwise["first"] + columns.start // BLOCK
        return found

    def _fill(self, rows: slice, values: Tensor) -> None:
        codes = self.rowwise["codes"][rows].flatten()
        numbers = self.shared["codebook"]
        pairs = torch.stack((numbers.repeat_interleave(16), numbers.repeat(16)), dim=1)  # [256, 2]
        torch.index_select(pairs, 0, codes.int(), out=values.view(-1, 2))
        values.view(-1, BLOCK).mul_(self._scales(rows).view(-1, 1))

    def _launch(self, kernels: type[DequantiseKernels], place: Tensor, counts: Tensor | None) -> None:
        shared = self.shared
        codes = Nf4Codes(
            self.rowwise["codes"],
            self.rowwise["absmax"],
            shared["codebook"],
            self.rowwise.get("first"),
            shared.get("scales"),
            shared.get("offsets"),
            shared.get("nested_codebook"),
        )
        kernels.nf4(place, codes, self.rounded_to, counts)

    def _scales(self, rows: slice) -> Tensor:
        """`[n, K / 64]` fp32 scales of some rows."""
        absmax = self.rowwise["absmax"][rows]
        if "first" not in self.rowwise:
            return absmax
        place = torch.arange(absmax.shape[1], dtype=torch.int32, device=absmax.device)
        block = ((self.rowwise["first"][rows] + place) // NESTED_BLOCK).flatten()
        found = self.shared["nested_codebook"].index_select(0, absmax.flatten().int())
        # First the product, then the sum, each rounded: as bitsandbytes has it.
        found.mul_(self.shared["scales"].index_select(0, block))
        return found.add_(self.shared["offsets"].index_select(0, block)).view(absmax.shape)
