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
