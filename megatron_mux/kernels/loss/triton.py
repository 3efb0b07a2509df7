"""Softmax statistics of logits and their gradient by two Triton kernels, which read and write each logit once each.

A row is computed by itself, so one that is not finite leaves the others as they are. See `kernels.loss.cross_entropy`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_mux.kernels.triton_launch import cdiv, launch

STATISTICS: dict[str, int] = {"BLOCK": 2048, "num_warps": 8, "num_stages": 3}
"""A program a row: enough programs as soon as there are some hundred rows."""
GRADIENT: dict[str, int] = {"BLOCK": 4096, "num_warps": 8, "num_stages": 1}


def statistics(
    logits: Tensor, columns: Tensor, stats: tuple[Tensor, Tensor, Tensor], sums: Tensor | None, valid: int
) -> None:
    """Fill `stats`: see `cross_entropy.statistics`; `sums` gets each row's sum of logits."""
    top, total, target = stats
    launch(
        statistics_kernel, (logits.shape[0],),
        (logits, columns, top, total, target, top if sums is None else sums, valid, logits.stride(0)),
        {"SUMS": sums is not None, **STATISTICS},
    )  # fmt: skip


def gradient_(
    logits: Tensor,
    columns: Tensor,
    top: Tensor,
    total: Tensor,
    smoothing: Tensor | None,
    valid: int,
    vocab: int,
) -> None:
    """Overwrite logits with their gradient: see `cross_entropy.gradient_`."""
    rows, width = logits.shape
    spread = top if smoothing is None else smoothing
    launch(
        gradient_kernel, (rows, cdiv(width, GRADIENT["BLOCK"])),
        (logits, columns, top, total, spread, valid, vocab, logits.stride(0), width),
        {"SMOOTHED": smoothing is not None, **GRADIENT},
    )  # fmt: skip


@triton.jit
def statistics_kernel(
    logits, columns, top, total, target, sums, valid, stride, SUMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of one row: each lane keeps its largest logit and its sum of exponentials below that."""
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * stride
    most = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    exponentials = tl.zeros((BLOCK,), dtype=tl.float32)
    plain = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, valid, BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = tl.load(values + places, mask=places < valid, other=float("-inf")).to(tl.float32)
        # A lane that has seen nothing but minus infinity must not subtract it from itself.
        larger = tl.maximum(most, x)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        exponentials = exponentials * tl.exp(most - shift) + tl.exp(x - shift)
        most = larger
        if SUMS:
            plain += tl.where(places < valid, x, 0.0)
    largest = tl.max(most)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(top + row, largest)
    tl.store(total + row, tl.sum(exponentials * tl.exp(most - shift)))
    column = tl.load(columns + row)
    tl.store(target + row, tl.load(values + column, mask=column >= 0, other=0.0).to(tl.float32))
    if SUMS:
        tl.store(sums + row, tl.sum(plain))


@triton.jit
def gradient_kernel(
    logits, columns, top, total, smoothing, valid, vocab, stride, width,
    SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = logits + row * stride + places
    x = tl.load(values, mask=places < valid, other=float("-inf")).to(tl.float32)
    # Dividing, not multiplying by an inverse, as torch does; the padding's exponential is zero whatever the row is.
    share = tl.exp(x - tl.load(top + row)) / tl.load(total + row)
    label = 1.0
    if SMOOTHED:
        spread = tl.load(smoothing + row)
        label = 1.0 - spread
        share -= spread / vocab
    share -= tl.where(places == tl.load(columns + row), label, 0.0)
    share = tl.where(places < valid, share, 0.0)
    tl.store(values, share.to(logits.dtype.element_ty), mask=places < width)
