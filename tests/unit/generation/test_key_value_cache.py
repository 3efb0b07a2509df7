"""Attention a token at a time is attention over whole sequences, whoever leaves, and whatever a neighbour holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.kernels.attention.key_value_cache import KeyValueCache
from megatron_mux.kernels.attention.segments import Segment, segment_attention

HEADS, GROUPS, WIDTH = 4, 2, 6
LENGTHS = {("a", 0): 9, ("a", 1): 4, ("b", 0): 7, ("b", 1): 8}
"""Tokens of each sequence in the end."""
PROMPTS = {("a", 0): 3, ("a", 1): 2, ("b", 0): 5, ("b", 1): 1}

Streams = dict[tuple[str, int], tuple[Tensor, Tensor, Tensor]]


def streams(narrow: int) -> Streams:
    generator = torch.Generator().manual_seed(0)

    def made(length: int, heads: int, width: int) -> Tensor:
        return torch.randn(length, heads, width, generator=generator, dtype=torch.float64)

    return {
        name: (made(length, HEADS, WIDTH), made(length, GROUPS, WIDTH), made(length, GROUPS, narrow))
        for name, length in LENGTHS.items()
    }


def parts(
    known: Streams, spans: dict[tuple[str, int], tuple[int, int]]
) -> tuple[list[Segment], list[Tensor]]:
    """The segments of some tokens of sequences, and their queries, keys and values."""
    segments: list[Segment] = []
    at = 0
    for name, (start, stop) in spans.items():
        segments.append(Segment(name[0], at, stop - start, name[1], past=start, continues=True))
        at += stop - start
    rows = [
        torch.cat([known[name][i][start:stop] for name, (start, stop) in spans.items()]) for i in range(3)
    ]
    return segments, rows


@pytest.mark.parametrize(("window", "narrow"), [(None, WIDTH), (4, WIDTH), (None, 5)])
def test_steps_add_up_to_whole_sequences(window: int | None, narrow: int) -> None:
    known = streams(narrow)
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 2, GROUPS, WIDTH, generator=generator, dtype=torch.float64)
    prefix = {"b": (key, value)} if narrow == WIDTH else {}  # no backbone has both
    options: Any = {"scale": 1 / math.sqrt(WIDTH), "window": window, "prefix": prefix}
    wanted = {}
    for name in LENGTHS:
        (segment,), (query, key, value) = parts(known, {name: (0, LENGTHS[name])})
        wanted[name] = segment_attention(query, key, value, [segment], **options)
    for tensor in known["a", 1]:
        tensor.fill_(math.nan)
    cache = KeyValueCache(PROMPTS, 2 + max(LENGTHS.values()))
    spans = {name: (0, length) for name, length in PROMPTS.items()}
    while spans:
        segments, (query, key, value) = parts(known, spans)
        padded = [torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (query, key, value)]
        found = cache.attend(3, padded[0], padded[1], padded[2], segments, **options)
        assert found.shape == (len(query) + 1, HEADS, narrow) and not found[-1].any()
        for segment, (name, (start, stop)) in zip(segments, spans.items(), strict=True):
            rows = found[segment.start : segment.start + segment.length]
            if name == ("a", 1):
                assert rows.isnan().all()
            else:
                torch.testing.assert_close(rows, wanted[name][start:stop], rtol=1e-12, atol=1e-12)
        ended = [name for name, (_, stop) in spans.items() if stop == LENGTHS[name]]
        cache.drop(ended)
        spans = {name: (stop, stop + 1) for name, (_, stop) in spans.items() if name not in ended}


def test_a_row_that_is_used_again_has_nothing_of_the_one_before() -> None:
    cache = KeyValueCache([], 0)
    cache.add([("a", 0), ("b", 0)], 9)
    spoilt = torch.full((4, GROUPS, WIDTH), float("nan"), dtype=torch.float64)
    query = torch.ones(4, HEADS, WIDTH, dtype=torch.float64)
    options: Any = {"scale": 1.0}

    def prompt(task: str, rows: Tensor) -> None:
        cache.attend(0, query, rows, rows, [Segment(task, 0, 4, 0, past=0, continues=True)], **options)

    prompt("a", spoilt)
    prompt("b", torch.ones_like(spoilt))
    cache.drop([("a", 0)])
    cache.add([("c", 0)], 9)
    prompt("c", torch.ones_like(spoilt))
    step = [Segment("b", 0, 1, 0, past=8, continues=True), Segment("c", 1, 1, 0, past=4, continues=True)]
    rows = torch.ones(2, GROUPS, WIDTH, dtype=torch.float64)
    found = cache.attend(0, query[:2], rows, rows, step, **options)
    assert torch.isfinite(found).all(), "a weight of zero times what is no number is none"


def test_a_cache_is_no_larger_than_twice_what_is_needed_and_a_failure_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = KeyValueCache([], 0)
    names = [("a", i) for i in range(8)]
    cache.add(names, 4)
    rows = torch.ones(8, GROUPS, WIDTH, dtype=torch.float64)
    segments = [Segment("a", i, 1, i, past=0, continues=True) for i in range(8)]
    cache.attend(0, rows[:, :1].expand(-1, HEADS, -1), rows, rows, segments, scale=1.0)
    cache.drop(names[1:])

    def fails(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_zeros", fails)
        with pytest.raises(torch.OutOfMemoryError):
            cache.add([("b", 0)], 100)
    cache.drop([("b", 0)])  # it is not there
    cache.add([("b", 0)], 100)
    (keys, _), *_ = cache._layers.values()
    assert keys.shape == (2, GROUPS, 100, WIDTH) and (keys[0, :, 0] == 1).all()
