"""The memory of a forward pass without a graph: tensors live for a moment, so the layer's fullest moment counts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_mux.adapters.costs import Row
from megatron_mux.kernels.short_attention import blocks_of, padded_length
from megatron_mux.memory.forms.engine_layer import EngineLayer


def forward_row(layer: EngineLayer) -> float:
    """Bytes of a row at the peak of a forward pass that keeps nothing, its input aside.

    All layers have the same peak. Adapters take less beside it: their temporary tensors of rows are narrow.

    Args:
        layer: A layer without experts or latent attention.
    """
    moments = [_in_attention(layer), _in_mlp(layer)] + [_before_attention(layer)] * layer.turned
    return max(map(layer.bytes, moments))


def _before_attention(layer: EngineLayer) -> Iterator[Row]:
    """What is there when a kernel has made queries, keys and values."""
    a = layer.architecture
    yield Row("input of the layer", "rows", a.hidden)
    yield Row("output of the first norm", "all", a.hidden)
    yield Row("product of linear_qkv, and queries, keys and values", "columns", 2 * (a.queries + 2 * a.keys))


def _in_attention(layer: EngineLayer) -> Iterator[Row]:
    """What is there when attention has been computed."""
    a = layer.architecture
    yield Row("input of the layer", "rows", a.hidden)
    yield Row("output of the first norm", "all", a.hidden)
    yield Row("product of linear_qkv, or queries, keys and values", "columns", a.queries + 2 * a.keys)
    if not layer.turned:
        yield from _changed(layer)
    if layer.short:
        padded = padded_length(layer.length)
        first, stop = list(blocks_of(padded))[-1]
        yield from layer.short_attention()
        yield Row("padded output", "columns", a.queries * padded / layer.length)
        yield Row("scores of the last block", "columns", a.heads * (stop - first) * stop / layer.length)
    elif layer.prefixed or (layer.one_kernel and not layer.turned):
        yield Row("copied keys and values", "columns", 2 * a.keys)
    if layer.repeats_keys:
        yield Row("keys and values of every head", "columns", 2 * a.queries)
    if layer.by_products:
        yield Row("scaled queries and keys", "columns", 2 * a.queries)
        yield Row("scores, and attention's weights", "columns", 2 * a.heads * layer.length)
    yield Row("output of attention", "columns", a.queries)


def _changed(layer: EngineLayer) -> Iterator[Row]:
    """Queries and keys, beside the product of linear_qkv."""
    a = layer.architecture
    if a.rotary:
        yield Row("rotated queries and keys", "columns", a.queries + a.keys)
    elif a.qk_norm:
        yield Row("normalised queries and keys", "columns", a.queries + a.keys)
    elif a.heads != a.kv_heads:
        yield Row("queries", "columns", a.queries)


def _in_mlp(layer: EngineLayer) -> Iterator[Row]:
    """What is there when the MLP's activation has been computed."""
    a = layer.architecture
    yield Row("input of the layer, and with attention's output", "rows", 2 * a.hidden)
    yield Row("output of the second norm", "all", a.hidden)
    several = layer.halves_apart or (a.activation == "quick_gelu" and not layer.fused)
    yield Row("inside the MLP", "columns", a.inner + a.ffn * (1 + several))
