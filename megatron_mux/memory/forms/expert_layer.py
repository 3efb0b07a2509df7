"""What a layer's experts keep from the forward to the backward pass, and take for a moment, as closed forms.

As `engine_layer`, which this is a part of; per row of a rank, of which each is computed by several experts
(`ExpertLoad`). With tensor parallelism each rank routes its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_mux.adapters.costs import Row
from megatron_mux.memory.forms.beginnings import BEGINS

if TYPE_CHECKING:
    from megatron_mux.memory.forms.engine_layer import EngineLayer

_INDEX = 8
"""Bytes of an index."""


def kept(layer: EngineLayer, begins: int) -> Iterator[Row]:
    """Tensors that are kept, adapters' own and their inputs aside.

    Args:
        layer: The layer.
        begins: Where gradients begin; see `beginnings`.
    """
    a, load = layer.architecture, layer.load
    moe = a.moe
    assert moe is not None and load is not None
    routing, wide = moe.routing, max(4, layer.size)
    if begins <= BEGINS["linear_proj"]:
        yield Row("scores", "rows", moe.count, wide)
        yield Row("experts of rows", "rows", routing.top_k, _INDEX)
        if routing.normalised:
            yield Row("weights before and their sum", "rows", routing.top_k + 1, wide)
        yield Row("outputs of pairs", "rows", load.pairs * a.hidden)
    yield from order(layer)
    yield Row("weights of pairs", "rows", load.pairs, layer.size if routing.cast else wide)
    if begins <= BEGINS["linear_fc1"]:
        inner = layer.expert_ffn * (2 if a.gated else 1)
        yield Row("input of experts' activation, or its output", "rows", load.pairs * inner)
        if layer.halves_apart:
            yield Row("activated half of experts", "rows", load.pairs * layer.expert_ffn)


def order(layer: EngineLayer) -> Iterator[Row]:
    """Where rows went and the order of their pairs, which are not saved tensors: recomputation keeps them."""
    load, moe = layer.load, layer.architecture.moe
    assert moe is not None and load is not None
    if layer.exchanges:
        yield Row(
            "rows sent, their experts, and where sums return",
            "rows",
            load.sent * (2 + moe.routing.top_k) + 1,
            _INDEX,
        )
    yield Row("order of pairs", "rows", 3 * load.pairs + load.received, _INDEX)
    yield Row("experts and tasks of pairs", "rows", load.pairs, 4)


def forward(layer: EngineLayer) -> list[Row]:
    """Temporary tensors when outputs have been weighted and are being summed for each row.

    What arrived and what experts' second product was given are held until their layer is done.

    Args:
        layer: The layer.
    """
    a, load = layer.architecture, layer.load
    assert a.moe is not None and load is not None
    weighted, summed = layer.pairs * a.hidden, load.received * a.hidden
    wide = layer.size if a.moe.routing.cast else max(4, layer.size)
    # Wider products are rounded before they are summed.
    rounded, last = (weighted * wide, 0.0) if wide > layer.size else (0.0, summed)
    return [
        Row("hidden states", "rows", a.hidden),
        Row("received rows", "rows", summed * layer.exchanges),
        Row("output of experts' activation", "rows", layer.pairs * layer.expert_ffn),
        Row("weighted outputs", "rows", weighted),
        Row("before they are rounded", "rows", rounded, 1),
        Row("sums", "rows", last),
    ]


def backward(layer: EngineLayer) -> list[Row]:
    """Temporary tensors of the product of outputs and weights going backward, when nothing has been freed yet.

    That product has the wider of their dtypes, and so has its gradient and what that becomes for each of the two.

    Args:
        layer: The layer.
    """
    a = layer.architecture
    assert a.moe is not None
    wide = layer.size if a.moe.routing.cast else max(4, layer.size)
    rounded = wide > layer.size
    return [
        Row("gradient of hidden states", "rows", a.hidden),
        Row("gradients of outputs and weights", "rows", layer.pairs * a.hidden * 3, wide),
        Row("rounded gradient of outputs", "rows", layer.pairs * a.hidden * rounded),
    ]
