"""What multi-head latent attention keeps from the forward to the backward pass, as closed forms: see `engine_layer`.

Queries and keys are concatenated of what has positions and what has none. Where values are narrower than they, core
attention is given values that zeros make as wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_mux.adapters.costs import Row
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.beginnings import BEGINS

if TYPE_CHECKING:
    from megatron_mux.memory.forms.engine_layer import EngineLayer


def kept(layer: EngineLayer, begins: int) -> Iterator[Row]:
    """Tensors that attention keeps, adapters' own and their inputs aside.

    Args:
        layer: The layer.
        begins: Where gradients begin; see `beginnings`.
    """
    a, latent = layer.architecture, layer.architecture.latent
    assert latent is not None
    if begins <= BEGINS["linear_qkv"]:
        for width in (latent.query_rank, latent.rank + latent.rotated):
            if width is not None:
                yield Row("product with the latent", "all", width)
                yield Row("statistics of the latent's norm", "all", layer.statistics, 4)
    short = layer.short
    if short:
        yield from layer.short_attention()
    else:
        yield Row("queries and keys", "columns", a.queries + a.keys)
    padded = a.attended != a.queries
    if not short and (padded or layer.one_kernel):
        yield Row("values, as wide as queries", "columns", a.queries)
    elif not short:
        yield Row("product of linear_kv_up", "columns", a.widths["linear_kv_up"][1])
    if not short:
        yield Row("output of core attention", "columns", a.queries)
        yield Row("log-sum-exp", "columns", a.heads, 4)


def backward(a: Architecture) -> int:
    """Values of a row that attention's backward pass takes for a moment, with all heads: an upper bound."""
    return 4 * a.queries + 2 * a.attended
