"""Sizes as functions of batch, length and rank, against traces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_mux.gpus import Gpu
from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.symbolic import BLOCK, UnlikeError, family
from megatron_mux.memory.trace.training import trace
from tests.unit.memory.traced import ADAPTERS, GPT2, LLAMA, on_a_fake_gpu

pytestmark = on_a_fake_gpu
LORA = ADAPTERS["lora"]
LONG = {"max_position_embeddings": 4096}


def traces(cases: Sequence[Case]) -> list[Stream]:
    return [trace(case) for case in cases]


def case(config: dict[str, Any], batch: int, length: int, **more: Any) -> Case:
    return Case(config, 2, batch, length, steps=1, **more)


@pytest.mark.parametrize(
    ("attention", "more"),
    [
        ("eager", {}),  # scores: of degree 2 in the length
        ("sdpa", {"recompute": True, "gpu": Gpu((8, 0), False)}),  # flash attention, in blocks of tokens
    ],
)
def test_any_batch_and_length(attention: Any, more: dict[str, Any]) -> None:
    start = case(LLAMA | LONG, 3, 200, adapter=LORA, attention=attention, **more)
    found = family(start, ("batch", "length"), traces)
    assert len(found.streams) == 6
    chance = random.Random(attention)
    batch, length = chance.randint(2, 600), 200 % BLOCK + BLOCK * chance.randint(1, 20)
    assert found.at(batch=batch, length=length) == trace(replace(start, batch=batch, length=length))


def test_any_rank() -> None:
    found = family(case(GPT2, 3, 16, adapter=LORA), ("batch", "rank"), traces)
    chance = random.Random(0)
    batch, rank = chance.randint(2, 600), chance.randint(1, 64)
    adapter = {**(LORA or {}), "r": rank}
    assert found.at(batch=batch, rank=rank) == trace(case(GPT2, batch, 16, adapter=adapter))
    assert found.at() == trace(case(GPT2, 3, 16, adapter=LORA))


def test_streams_that_are_no_function_of_the_batch() -> None:
    # From 3,073 tokens on the embedding's gradient sorts them.
    with pytest.raises(UnlikeError, match="events depend"):
        family(case(LLAMA, 3, 16), ("batch",), traces)
    assert family(case(LLAMA, 200, 16), ("batch",), traces, least=193)


def test_a_size_that_is_none() -> None:
    found = family(case(LLAMA, 3, 16, adapter=LORA), ("batch",), traces)
    with pytest.raises(UnlikeError, match="bytes at"):
        found.at(batch=-100)


def test_a_third_trace_tells_whether_sizes_are_affine() -> None:
    def bent(cases: Sequence[Case]) -> list[Stream]:
        *streams, last = traces(cases)
        last.sizes[-1] += 1
        return [*streams, last]

    with pytest.raises(UnlikeError, match=r"block .* has"):
        family(case(LLAMA, 3, 16, adapter=LORA), ("batch",), bent)
