"""Packed attention against attention written out, segment by segment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_mux.kernels.attention import segments as attention
from megatron_mux.kernels.attention.segments import Bounds, Segment, segment_attention

HEADS, GROUPS, SIZE = 6, 2, 4
LENGTHS = (5, 5, 3, 8, 8, 1)
TASKS = ("a", "a", "b", "c", "c", "c")


def segments() -> tuple[Segment, ...]:
    found, start = [], 0
    for i, (task, length) in enumerate(zip(TASKS, LENGTHS, strict=True)):
        found.append(Segment(task, start, length, i))
        start += length
    return tuple(found)


def inputs(padding: int = 3, groups: int = GROUPS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = sum(LENGTHS) + padding
    return tuple(  # type: ignore[return-value]
        torch.randn(rows, heads, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, groups, groups)
    )


def prefixes(groups: int = GROUPS) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return {
        task: tuple(  # type: ignore[misc]
            torch.randn(count, groups, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
            for _ in range(2)
        )
        for task, count in (("a", 2), ("c", 4), ("absent", 3))
    }


def written_out(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, prefix: dict[str, Any]
) -> Tensor:
    out = torch.zeros_like(query)
    for segment in segments():
        rows = slice(segment.start, segment.start + segment.length)
        before = prefix.get(segment.task, (key[:0], value[:0]))
        k = torch.cat((before[0], key[rows])).repeat_interleave(HEADS // key.shape[1], dim=1)
        v = torch.cat((before[1], value[rows])).repeat_interleave(HEADS // key.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[rows], k) * scale
        at = torch.arange(segment.length).unsqueeze(1) + before[0].shape[0]
        of = torch.arange(k.shape[0])
        seen = (of <= at) & (of > at - (window or k.shape[0] + 1))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out = out.index_add(0, torch.arange(rows.start, rows.stop), torch.einsum("hqk,khd->qhd", weights, v))
    return out


@pytest.mark.parametrize("groups", [HEADS, GROUPS])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("with_prefix", [False, True])
def test_agrees_with_attention_written_out(groups: int, window: int | None, with_prefix: bool) -> None:
    found, gradients = [], []
    for function in ("ours", "written out"):
        query, key, value = inputs(groups=groups)
        prefix = prefixes(groups) if with_prefix else {}
        if function == "ours":
            out = segment_attention(query, key, value, segments(), scale=0.7, window=window, prefix=prefix)
        else:
            out = written_out(query, key, value, 0.7, window, prefix)
        leaves = [query, key, value, *(x for task in ("a", "c") if prefix for x in prefix[task])]
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        gradients.append(torch.autograd.grad((out * weights).sum(), leaves))
        found.append(out)
    assert torch.allclose(found[0], found[1], atol=1e-12)
    for ours, wanted in zip(*gradients, strict=True):
        assert torch.allclose(ours, wanted, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 2])
def test_a_segment_that_is_not_finite_reaches_no_other(bad: float, window: int | None) -> None:
    results = []
    for value_of_row in (0.5, bad):
        query, key, value = inputs(padding=0)
        prefix = prefixes()
        with torch.no_grad():
            for x in (query, key, value, *prefix["a"]):
                x[:3] = value_of_row
        out = segment_attention(query, key, value, segments(), scale=1.0, window=window, prefix=prefix)
        grads = torch.autograd.grad(out.sum(), (query, key, value, *prefix["c"]))
        results.append([out[10:], *(g[10:] for g in grads[:3]), *grads[3:]])
    for clean, beside in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, beside)


def fake_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, *, scale: float, window: int | None
) -> Tensor:
    """What torch documents of its variable-length kernel, on a CPU."""
    outputs = []
    for i in range(bounds.queries.shape[0] - 1):
        q, k = (slice(int(c[i]), int(c[i + 1])) for c in (bounds.queries, bounds.keys))
        assert q.stop - q.start <= bounds.longest_query and k.stop - k.start <= bounds.longest_key
        per_group = query.shape[1] // key.shape[1]
        keys, values = (x[k].repeat_interleave(per_group, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q], keys) * scale
        at = torch.arange(q.stop - q.start).unsqueeze(1) + (k.stop - k.start) - (q.stop - q.start)
        of = torch.arange(k.stop - k.start)
        seen = of <= at
        if window is not None:
            seen = seen & (of > at - window)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def by_varlen(*args: Any) -> Tensor:
    """The variable-length path with the kernel above."""
    query, key, value, parts, scale, window, prefix = args
    bounds = attention.device_bounds(parts, prefix, query.device)
    with mock.patch.object(attention, "_flash", fake_flash):
        return attention._by_varlen(query, key, value, parts, scale, window, prefix, bounds)


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("with_prefix", [False, True])
@pytest.mark.parametrize("pasts", [(0,) * 6, (0, 3, 2, 0, 4, 6), (3, 0, 2, 4, 0, 0)])
def test_the_variable_length_path_gives_the_same(
    window: int | None, with_prefix: bool, pasts: tuple[int, ...]
) -> None:
    parts = tuple(replace(segment, past=past) for segment, past in zip(segments(), pasts, strict=True))
    found = []
    for path in (attention._by_runs, by_varlen):
        query = inputs()[0]
        _, key, value = inputs(padding=3 + sum(pasts))
        prefix = prefixes() if with_prefix else {}
        out = path(query, key, value, parts, 0.7, window, prefix)
        assert out.shape == query.shape
        leaves = [query, key, value, *(x for task in ("a", "c") if prefix for x in prefix[task])]
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, wanted in zip(*found, strict=True):
        assert torch.allclose(ours, wanted, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
def test_torch_s_operator_takes_what_it_is_given(window: int | None) -> None:
    """On a GPU's tensors without values; heads share keys."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (
            torch.empty(24, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2)
        )
        at = torch.tensor([0, 10, 24], dtype=torch.int32, device="cuda")
        out = attention._flash(query, key, value, Bounds(at, at, 14, 14, None), scale=1.0, window=window)
    assert out.shape == query.shape and out.device.type == "cuda"


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("with_prefix", [False, True])
def test_a_past_is_what_comes_before_the_segment(window: int | None, with_prefix: bool) -> None:
    query, key, value = inputs(padding=0)
    prefix = prefixes() if with_prefix else {}
    whole = segment_attention(query, key, value, segments(), scale=0.7, window=window, prefix=prefix)
    # The last rows of each sequence as a chunk of their own; what is before them is their past.
    pasts, own, parts = list[Tensor](), list[Tensor](), list[Segment]()
    for segment in segments():
        past = segment.length // 2
        rows = torch.arange(segment.start, segment.start + segment.length)
        parts.append(replace(segment, start=sum(map(len, own)), length=segment.length - past, past=past))
        pasts.append(rows[:past])
        own.append(rows[past:])
    order = torch.cat([*pasts, *own])
    out = segment_attention(
        query[torch.cat(own)], key[order], value[order], parts, scale=0.7, window=window, prefix=prefix
    )
    assert torch.allclose(out, whole[torch.cat(own)], atol=1e-12)
