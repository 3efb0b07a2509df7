"""Streams of sequence lengths that are not traced, against traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_mux.gpus import Gpu
from megatron_mux.memory.lengths import Length
from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.training import trace
from tests.unit.memory.traced import LLAMA, on_a_fake_gpu

pytestmark = on_a_fake_gpu
LONG = {**LLAMA, "max_position_embeddings": 4096}


class Traces:
    """Traces cases, and counts those of each length."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, cases: Sequence[Case]) -> list[Stream]:
        self.lengths += [case.length for case in cases]
        return [trace(case) for case in cases]


@pytest.mark.parametrize(
    ("attention", "more"),
    [
        ("eager", {}),
        ("sdpa", {"recompute": True, "gpu": Gpu((8, 0), False)}),  # flash attention
    ],
)
def test_any_length(attention: Any, more: dict[str, Any]) -> None:
    traces = Traces()
    length = Length.of(768, traces, 4096)
    single = Case(LONG, 2, 1, 768, steps=1, attention=attention, **more)
    assert length.family(single).at(11) == trace(replace(single, batch=11))
    assert length([single]) == [trace(single)]
    assert set(traces.lengths) == {640, 896, 1024}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({**LONG, "model_type": "mistral", "sliding_window": 900}, 768),
        (LONG, 2700),  # from 3,073 tokens on the embedding's gradient sorts them
    ],
)
def test_events_that_change_between_traced_lengths(config: dict[str, Any], tokens: int) -> None:
    traces = Traces()
    single = Case(config, 2, 1, tokens, steps=1)
    assert Length.of(tokens, traces, 4096)([single]) == [trace(single)]
    assert traces.lengths[-1] == tokens


@pytest.mark.parametrize(("tokens", "positions"), [(512, 4096), (700, 1000)])
def test_lengths_that_are_traced_themselves(tokens: int, positions: int) -> None:
    """Short ones, and those whose neighbours would be longer than the model's positions."""
    traces = Traces()
    Length.of(tokens, traces, positions).family(Case(LONG, 2, 1, tokens, steps=1))
    assert set(traces.lengths) == {tokens}
