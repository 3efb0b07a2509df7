"""Short segments in batched products against scaled-dot-product attention, segment by segment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_mux.kernels.attention import segments as attention
from megatron_mux.kernels.attention.segments import Segment, segment_attention
from megatron_mux.kernels.attention.short import BLOCK, LONGEST, padded_length, pairs_and_padding

LENGTHS = (5, 40, 3, 8, 33, 1, BLOCK + 6, 3 * BLOCK)
HEADS, GROUPS, SIZE = 6, 2, 8


def segments() -> tuple[Segment, ...]:
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return tuple(
        Segment(f"task-{i}", start, length, i)
        for i, (start, length) in enumerate(zip(starts, LENGTHS, strict=True))
    )


def inputs(dtype: torch.dtype, groups: int = GROUPS, padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = sum(LENGTHS) + padding
    query, key, value = (
        torch.randn(rows, heads, SIZE, generator=generator).to(dtype).requires_grad_(True)
        for heads in (HEADS, groups, groups)
    )
    return query, key, value


@pytest.mark.parametrize("groups", [GROUPS, HEADS])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_agrees_with_attention_run_by_run(groups: int, window: int | None) -> None:
    found = []
    for short in (True, False):
        leaves = inputs(torch.float64, groups)
        if short:
            out = segment_attention(*leaves, segments(), scale=0.7, window=window)
            assert out.grad_fn is not None and "ShortAttention" in out.grad_fn.name()
        else:
            out = attention._by_runs(*leaves, segments(), 0.7, window, {})
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for ours, wanted in zip(*found, strict=True):
        assert torch.allclose(ours, wanted, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_about_as_exact_as_torch(dtype: torch.dtype) -> None:
    """Of rounded inputs, against fp64: short segments by products, and run by run."""
    query, key, value = exact = tuple(x.detach().double().requires_grad_(True) for x in inputs(dtype))
    wanted = attention._by_runs(query, key, value, segments(), 0.35, None, {})
    weights = torch.linspace(-1, 1, wanted.numel()).view_as(wanted).to(dtype)
    references = [wanted, *torch.autograd.grad(wanted, exact, weights.double())]
    for function in (segment_attention, attention._by_runs):
        leaves = inputs(dtype)
        if function is segment_attention:
            out = segment_attention(*leaves, segments(), scale=0.35)
        else:
            out = attention._by_runs(*leaves, segments(), 0.35, None, {})
        for ours, reference in zip(
            [out, *torch.autograd.grad(out, leaves, weights)], references, strict=True
        ):
            assert (ours.double() - reference).norm() < 5e-3 * reference.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_segment_that_is_not_finite_reaches_no_other(bad: float) -> None:
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[5:45] = False  # the second segment: of a class with the fifth
    results = []
    for value_of_row in (0.5, bad):
        leaves = inputs(torch.bfloat16)
        with torch.no_grad():
            for x in leaves:
                x[5:45] = value_of_row
        out = segment_attention(*leaves, segments(), scale=1.0)
        found = [out, *torch.autograd.grad(out.sum(), leaves)]
        results.append([x[others] for x in found])
    for clean, beside in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, beside)


def test_padding_rows_are_zero_and_take_no_part() -> None:
    leaves = inputs(torch.bfloat16, padding=3)
    with torch.no_grad():
        for x in leaves:
            x[-3:] = float("nan")
    out = segment_attention(*leaves, segments(), scale=1.0)
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert torch.equal(gradient[-3:], torch.zeros_like(gradient[-3:]))
        assert gradient.isfinite().all()


def test_padded_lengths() -> None:
    for length in range(1, 600):
        padded = padded_length(length)
        assert length <= padded < length + max(8, length / 4) and padded % 8 == 0
    assert [padded_length(n) for n in (1, 8, 33, 64, 65, 129, 256)] == [8, 8, 40, 64, 80, 160, 256]


def test_long_segments_go_to_torch() -> None:
    x = torch.randn(LONGEST + 1, 2, SIZE, requires_grad=True)
    out = segment_attention(x, x, x, [Segment("task", 0, LONGEST + 1, 0)], scale=1.0)
    assert out.grad_fn is not None and "ShortAttention" not in out.grad_fn.name()


def test_long_and_prefixed_neighbours_change_no_bit() -> None:
    """How a short segment is computed depends on itself alone."""
    long, rows = LONGEST + 3, sum(LENGTHS)
    prefix = {"prefixed": (torch.randn(4, GROUPS, SIZE), torch.randn(4, GROUPS, SIZE))}
    short = segments()
    beside = (
        *short[:3],
        Segment("long", short[3].start, long, 100),
        Segment("prefixed", short[3].start + long, 7, 101),
        *(Segment(s.task, s.start + long + 7, s.length, s.sequence) for s in short[3:]),
    )
    at = short[3].start
    own = torch.cat((torch.arange(at), torch.arange(at, rows) + long + 7))
    alone = inputs(torch.float32)
    among = []
    for x in alone:
        wider = torch.randn(rows + long + 7, *x.shape[1:])
        wider[own] = x.detach()
        among.append(wider.requires_grad_(True))
    query, key, value = among
    found = segment_attention(query, key, value, beside, scale=0.3, prefix=prefix)
    wanted = segment_attention(*alone, short, scale=0.3)
    assert torch.equal(found[own], wanted)
    gradients = zip(
        torch.autograd.grad(found.sum(), among), torch.autograd.grad(wanted.sum(), alone), strict=True
    )
    assert all(torch.equal(ours[own], theirs) for ours, theirs in gradients)


def test_what_is_kept_is_as_counted() -> None:
    out = segment_attention(*inputs(torch.float32), segments(), scale=0.7)
    assert out.grad_fn is not None
    queries, keys, _, *weights = out.grad_fn.saved_tensors  # type: ignore[attr-defined]
    pairs, padding, largest = pairs_and_padding(LENGTHS)
    assert sum(own.numel() for own in weights) == pairs * HEADS
    assert max(own.numel() for own in weights) == largest * HEADS
    assert len(queries) == len(keys) == (sum(LENGTHS) + padding) * GROUPS
