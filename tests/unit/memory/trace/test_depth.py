"""How layers are taken together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.depth import few, tells_layers_apart


@pytest.mark.parametrize(
    ("kinds", "layers"),
    [
        ((), [2, 3]),
        ((0, 1) * 21, [4, 6]),
        (((0,) * 5 + (1,)) * 4 + (0, 0), [8, 14]),
        ((0, *(1,) * 60), [2, 3]),
        ((0, 0, 0, *(1,) * 58), [4, 5]),
        (tuple(range(30)), [30]),
    ],
)
def test_what_is_traced_first(kinds: tuple[int, ...], layers: list[int]) -> None:
    found = few(Case({}, len(kinds) or 80, 1, 8, kinds=kinds))
    assert [case.layers for case in found] == layers


@pytest.mark.parametrize(
    ("adapter", "apart"),
    [
        (None, False),
        ({"peft_type": "LORA"}, False),
        ({"target_modules": "all-linear", "layers_to_transform": None}, False),
        ({"target_modules": ["q_proj", "self_attn.v_proj"]}, False),
        ({"target_modules": ["model.layers.3.self_attn.q_proj"]}, True),
        ({"target_modules": r".*\.[0-4]\..*q_proj"}, True),
        ({"layers_to_transform": [0, 1]}, True),
        ({"rank_pattern": {"layers.0": 4}}, True),
    ],
)
def test_adapters_that_are_not_alike_in_all_layers(adapter: Mapping[str, Any] | None, apart: bool) -> None:
    assert tells_layers_apart(adapter) is apart
    assert len(few(Case({}, 80, 1, 8, adapter))) == (1 if apart else 2)
