"""What latent attention and experts keep, and which layers of a backbone have them: counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_mux.expert_shape import ExpertNames, Experts, Placement, Routing
from megatron_mux.memory.assumed_routes import ExpertLoad
from megatron_mux.memory.forms.architecture import Architecture, Unit
from megatron_mux.memory.forms.engine_layer import EngineLayer
from megatron_mux.memory.forms.engine_memory import EngineMemory, Rows
from megatron_mux.memory.forms.method import Method, methods
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.shape import Latent
from tests.unit.memory.architectures import llama, lora

LATENT = Latent(48, 32, 16, 8, 16, 1e-6, interleaved=True, wide_rotation=False)
"""With eight heads: queries and keys of 192 values a row, values of 128."""
EXPERTS = Experts(8, 64, 96, Routing(2), frozenset({0}), ExpertNames("", "", "", "", "", ""))
"""Behind a dense layer."""


def deepseek(**more: Any) -> Architecture:
    """Two layers; the second one has experts."""
    dense, sparse = Unit(divided=1000, copied=10), Unit(divided=500, copied=10, experts=8 * 100)
    sizes: dict[str, Any] = {
        "kv_heads": 8,
        "head_dim": 24,
        "latent": LATENT,
        "moe": EXPERTS,
        "experts": 8,
        "experts_per_token": 2,
    }
    return replace(llama(), **{"layers": (dense, sparse), **sizes, **more})


def layer(architecture: Architecture, size: int = 2, **more: Any) -> EngineLayer:
    """A layer in sequences of 128 tokens."""
    return EngineLayer(architecture, size, 128, **more)


def test_latent_attention_keeps_latents_and_padded_values() -> None:
    kept = {row.what: row.width for row in layer(deepseek()).kept()}
    assert kept["queries and keys"] == 2 * 192 and kept["values, as wide as queries"] == 192
    assert kept["output of core attention"] == 192
    up = {row.what for row in layer(deepseek()).kept(first="linear_kv_up")}
    assert set(kept) - up == {
        "input of the first norm", "statistics of the first norm", "product with the latent",
        "statistics of the latent's norm",
    }  # fmt: skip
    one = layer(deepseek())
    more = one.bytes(one.kept(inputs=frozenset({"linear_proj"}))) - one.bytes(one.kept())
    assert more == 2 * 128, "what core attention returns is cut to the width of values"


def test_shared_experts_are_an_mlp_beside_the_others() -> None:
    load = ExpertLoad(1.0, 1.0, 2.0)
    alone = replace(deepseek(), moe=replace(EXPERTS, shared_ffn=0))
    with_shared, without = (layer(a, load=load) for a in (deepseek(), alone))
    assert with_shared.bytes(with_shared.kept()) - without.bytes(without.kept()) == 2 * 2 * 96
    inputs = with_shared.kept(inputs=frozenset({"shared_fc1", "shared_fc2"}))
    assert with_shared.bytes(inputs) - with_shared.bytes(with_shared.kept()) == 2 * (256 + 96)


def test_layers_keep_what_is_theirs() -> None:
    def kept(*layers: int) -> float:
        model = deepseek(layers=tuple(deepseek().layers[i] for i in layers))
        dense = frozenset(place for place, i in enumerate(layers) if i == 0)
        model = replace(model, moe=replace(EXPERTS, dense=dense))
        memory = EngineMemory(model, [lora(model)], [range(len(layers))], Method(), 2, [(64,)])
        batch = Rows(np.array([[64.0]]), np.array([64.0]), np.array([64.0]), np.zeros(1))
        return float(memory.passes(batch).kept[0, 0])

    assert kept(0, 1, 1) - kept(0, 1) == pytest.approx(kept(1, 1) - kept(1))
    assert kept(0, 0, 1) - kept(0, 1) != pytest.approx(kept(0, 1, 1) - kept(0, 1))


def test_a_rank_has_the_experts_that_are_placed_there() -> None:
    ranks = ((0,),) * 6 + ((1,), (0, 1))
    model = deepseek(placement=Placement(2, {1: ranks}))
    method = Method(data=2, expert=2)

    even, placed = (
        EngineMemory(one, [lora(one)], [range(2)], method, 2, [(64,)]).lasting.parameters[0]
        for one in (deepseek(), model)
    )
    assert placed - even == 2 * 100 * (7 - 4), "of the rank that holds most"
    found = methods(4, model, Recipe(64, adapters=(lora(model),)))
    assert {one.expert for one in found} == {2}, "as many expert ranks as the placement is for"
