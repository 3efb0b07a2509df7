"""Triton kernels that dequantise a matrix in one launch, bit-equal to the loops of `quantised`.

A thread takes *groups* of neighbouring values of a row that share a scale, and writes 16 bytes of a half-precision
matrix at once. Programs are laid out expert by expert, so that one whose expert has no rows ends at once; a matrix that
is no expert's counts as one expert. Products and sums are rounded one by one: contraction to fused multiply-adds is
switched off at each launch.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mux.kernels.dequantise.interface import DequantiseKernels, EightBitCodes, Nf4Codes
from megatron_mux.kernels.triton_launch import cdiv, launch

GROUPS = 256
"""Groups of a program."""
NF4_WARPS, EIGHT_BIT_WARPS = 4, 2
"""By measurement on an H200: NF4 takes 15% to 20% longer otherwise, 8 bits as long, or 11% to 19% longer."""
_WIDTH = 8
"""Values of a group, if the sizes allow it."""
_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
HOW: dict[str, Any] = {"enable_fp_fusion": False}
"""How kernels are launched: each product and sum is rounded by itself."""


class TritonDequantise(DequantiseKernels):
    """See `DequantiseKernels`."""

    @staticmethod
    def nf4(place: Tensor, codes: Nf4Codes, rounded_to: torch.dtype | None, counts: Tensor | None) -> None:
        """See `DequantiseKernels.nf4`."""
        rows, columns = place.shape
        grid, groups = _grid(rows, columns // _WIDTH, counts)
        arguments = (
            place, codes.packed.view(torch.int32), codes.absmax, codes.codebook, codes.first, codes.scales,
            codes.offsets, codes.nested_codebook, counts, groups, columns // _WIDTH,
        )  # fmt: skip
        constants = {
            "ROUNDED": _TYPES[rounded_to or torch.float32],
            "GROUPS": GROUPS,
            "num_warps": NF4_WARPS,
            **HOW,
        }
        launch(nf4_kernel, grid, arguments, constants)

    @staticmethod
    def eight_bit(place: Tensor, codes: EightBitCodes, counts: Tensor | None) -> None:
        """See `DequantiseKernels.eight_bit`."""
        rows, columns = place.shape
        blocks = codes.scales.shape[1]
        width = gcd(_WIDTH, columns // blocks)
        grid, groups = _grid(rows, columns // width, counts)
        arguments = (
            place, codes.codes.view(torch.int8), codes.scales, counts,
            groups, columns // width, columns // blocks // width, blocks,
        )  # fmt: skip
        constants = {
            "FLOATING": codes.floating,
            "GROUPS": GROUPS,
            "WIDTH": width,
            "num_warps": EIGHT_BIT_WARPS,
            **HOW,
        }
        launch(eight_bit_kernel, grid, arguments, constants)


def _grid(rows: int, row_groups: int, counts: Tensor | None) -> tuple[tuple[int, int], int]:
    """Programs of an expert, and experts; and groups of an expert."""
    experts = 1 if counts is None else len(counts)
    groups = rows // experts * row_groups
    assert groups * experts < 1 << 31, "groups are counted in 32 bits"
    return (cdiv(groups, GROUPS), experts), groups


@triton.jit
def _groups(groups, GROUPS: tl.constexpr):
    """This program's groups, and which of them there are: fewer at the end of an expert."""
    local = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    return tl.program_id(1) * groups + local, local < groups


@triton.jit(
    do_not_specialize_on_alignment=["packed"]
)  # so that a thread loads the word whose values it stores
def nf4_kernel(
    place, packed, absmax, codebook, first, scales, offsets, nested_codebook, counts, groups, row_groups,
    ROUNDED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A group is a word of eight 4-bit codes; eight groups share a scale."""
    if counts is not None:  # noqa: SIM102  (Triton computes both sides of an "and")
        if tl.load(counts + tl.program_id(1)) == 0:
            return
    group, mask = _groups(groups, GROUPS)
    word = tl.load(packed + group, mask=mask, other=0)
    block = group // 8
    scale = tl.load(absmax + block, mask=mask, other=0)
    if first is not None:
        row = group // row_groups
        nested = tl.load(first + row, mask=mask, other=0) + (block - row * (row_groups // 8))
        nested = nested // 256
        known = tl.load(nested_codebook + scale.to(tl.int32))
        scale = known * tl.load(scales + nested, mask=mask, other=0) + tl.load(
            offsets + nested, mask=mask, other=0
        )
    number = tl.arange(0, 8)  # of a value: of two in a byte, the first has the higher bits
    code = (word[:, None] >> (4 * (number ^ 1))[None, :]) & 15
    values = tl.load(codebook + code) * scale[:, None]
    _store(place, group, number, mask, values.to(ROUNDED).to(tl.float32), 8)


@triton.jit
def eight_bit_kernel(
    place, codes, scales, counts, groups, row_groups, block_groups, blocks,
    FLOATING: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A group is WIDTH bytes."""
    if counts is not None:  # noqa: SIM102  (Triton computes both sides of an "and")
        if tl.load(counts + tl.program_id(1)) == 0:
            return
    group, mask = _groups(groups, GROUPS)
    row = group // row_groups
    scale = tl.load(scales + row * blocks + (group - row * row_groups) // block_groups, mask=mask, other=0)
    number = tl.arange(0, WIDTH)
    places = group.to(tl.int64)[:, None] * WIDTH + number[None, :]
    code = tl.load(codes + places, mask=mask[:, None], other=0)
    if FLOATING:
        # e4m3's bits in the places of fp32's: smaller by 2^120, subnormal numbers included. 480 would be its NaN.
        bits = (code.to(tl.int32) << 20) & -0x78100000
        values = bits.to(tl.float32, bitcast=True) * 2.0**120
        values = tl.where(tl.abs(values) > 448, float("nan"), values)
    else:
        values = code.to(tl.float32)
    _store(place, group, number, mask, values * scale[:, None], WIDTH)


@triton.jit
def _store(place, group, number, mask, values, WIDTH: tl.constexpr):
    places = place + (group.to(tl.int64)[:, None] * WIDTH + number[None, :])
    tl.store(places, values.to(place.dtype.element_ty), mask=mask[:, None])
