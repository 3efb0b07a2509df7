"""Sizes as functions of the number of sequences, against traces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_mux.gpus import Gpu
from megatron_mux.memory.batches import BatchFamily, UnlikeError
from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.training import trace
from tests.unit.memory.traced import ADAPTERS, LLAMA, on_a_fake_gpu

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
        ("eager", {}),
        ("sdpa", {"recompute": True, "gpu": Gpu((8, 0), False)}),  # flash attention
    ],
)
def test_any_batch(attention: Any, more: dict[str, Any]) -> None:
    found = BatchFamily.of(case(LLAMA | LONG, 3, 200, adapter=LORA, attention=attention, **more), traces)
    batch = random.Random(attention).randint(2, 600)
    whole = case(LLAMA | LONG, batch, 200, adapter=LORA, attention=attention, **more)
    assert found.at(batch) == trace(whole)


def test_streams_that_are_no_function_of_the_batch() -> None:
    # From 3,073 tokens on the embedding's gradient sorts them.
    with pytest.raises(UnlikeError, match="events depend"):
        BatchFamily.of(case(LLAMA, 3, 16), traces)
    assert BatchFamily.of(case(LLAMA, 193, 16), traces)


def test_a_third_trace_tells_whether_sizes_are_affine() -> None:
    def bent(cases: Sequence[Case]) -> list[Stream]:
        *streams, last = traces(cases)
        last.sizes[-1] += 1
        return [*streams, last]

    with pytest.raises(UnlikeError, match=r"block .* has"):
        BatchFamily.of(case(LLAMA, 3, 16, adapter=LORA), bent)
