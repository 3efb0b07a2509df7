"""Traces one layer of a backbone with low-rank adapters, forward and backward, to FX graphs with its collectives.

Dynamo rewrites collectives as functional ones, and AOTAutograd traces the backward with them: both passes are exact.
(`make_fx` loses the wait of in-place collectives, and `torch.export` computes wrong gradients.)

Our own autograd functions are opaque to Dynamo or write into views. Plain formulas of the same values replace them
while a layer is traced: of low-rank terms, rotary embedding, gated activations and attention (a call for each segment).
So the graph has the layer's operators and messages, not the kernels that compute it. Of adapters it takes low-rank
terms without dropout, prefixes and pasts it leaves out.

Shapes: T rows of the micro-batch, H hidden, D head size, h heads.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megatron_mux import megatron_core
from megatron_mux.adapters import base_op
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.attributes import replaced
from megatron_mux.backbone import sublayers
from megatron_mux.backbone.layer import compute_layer
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.kernels.attention.segments import Segment
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.low_rank.terms import TermTable
from megatron_mux.kernels.pointwise import functions as fused_pointwise

ADAPTER = "adapter"
"""Key in a node's `meta["custom"]` that marks operators of adapters, forward and backward."""


@dataclass(frozen=True)
class LayerGraph:
    """A traced layer.

    Attributes:
        forward, backward: The graphs, with one node for each collective and one for its wait.
        output: `[T, 1, H]`, computed by the forward graph; its `backward` runs the backward graph.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    output: Tensor


def trace_layer(
    backbone: Backbone, index: int, adapters: AdapterSet, batch: PackedBatch, hidden: Tensor
) -> LayerGraph:
    """Trace a layer, and compute it.

    Args:
        index: Of the layer within the stage.
        adapters: Of the stage's tasks. A and B of their terms require gradients from now on: `output.backward` adds
            to their `grad`.
        batch: The micro-batch, without padding.
        hidden: `[T, 1, H]`, requires a gradient; with sequence parallelism this rank's rows.
    """
    from functorch.compile import default_partition, make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    layer: Any = backbone.model.decoder.layers[index]
    angles = backbone.angles(batch)[index]
    _make_ready(adapters, batch)
    graphs: list[fx.GraphModule] = []

    def divide(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs[:] = default_partition(joint, inputs, **options)
        for graph in graphs:  # the backward still has what led to the forward's messages
            graph.graph.eliminate_dead_code()
            graph.recompile()
        return graphs[0], graphs[1]

    def as_is(graph: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def compute(x: Tensor) -> Tensor:
        return compute_layer(layer, x, angles, labelled_only=False, recompute=False)

    backend = aot_autograd(fw_compiler=as_is, bw_compiler=as_is, partition_fn=divide)
    _show_torch_to_dynamo(backbone.device)
    with _plain_formulas(backbone, layer), activate(batch):
        output = torch.compile(compute, backend=backend, fullgraph=True, dynamic=False)(hidden)
    forward, backward = graphs
    return LayerGraph(forward, backward, output)


def _show_torch_to_dynamo(device: torch.device) -> None:
    """Have Dynamo note torch's functions, which it tells by identity, while none of them is replaced for Megatron."""
    torch._dynamo.reset()
    megatron_core.adapt_to(None)
    torch.compile(torch.neg, backend="eager")(torch.zeros(1))
    megatron_core.adapt_to(device)


def _make_ready(adapters: AdapterSet, batch: PackedBatch) -> None:
    """Compute what is computed when first asked for: Dynamo cannot."""
    _ = batch.groups.slot_set
    for op in adapters.ops:
        op.others(frozenset())
        for terms in op.tables.low_rank.of_slot.values():
            for term, _ in terms:
                term.down.requires_grad_()
                term.up.requires_grad_()


@contextmanager
def _plain_formulas(backbone: Backbone, layer: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in (
            (base_op, "low_rank_linear", _low_rank_linear),
            (sublayers, "segment_attention", _attention),
            (fused_pointwise, "rotate", _rotate),
            (fused_pointwise, "gated", _no_function),
            (warnings, "warn", _say_nothing),  # Megatron warns while it computes
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


def _say_nothing(*arguments: Any, **named: Any) -> None:
    pass


def _low_rank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    anchor: Tensor,
    table: TermTable,
    groups: RowGroups,
    kernels: Any,
) -> Tensor:
    """See `kernels.low_rank.product.low_rank_linear`; without dropout and factors."""
    y = F.linear(x, weight, bias)
    total: Tensor | None = None
    with fx.traceback.annotate({ADAPTER: True}):
        for slot, (start, stop) in zip(groups.slots, groups.rows, strict=True):
            if slot not in table.of_slot:
                continue
            rows = x if stop - start == x.shape[0] else x[start:stop]
            for term, _ in table.of_slot[slot]:
                added = F.linear(F.linear(rows, term.down), term.up) * term.scale
                if term.columns is not None:
                    added = x.new_zeros(stop - start, y.shape[1]).index_add(1, term.columns, added)
                if stop - start < y.shape[0]:
                    added = F.pad(added, (0, 0, start, y.shape[0] - stop))
                total = added if total is None else total + added
    return y if total is None else y + total


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    *,
    scale: float,
    window: int | None,
    **_: Any,
) -> Tensor:
    """See `kernels.attention.segments.segment_attention`; without prefix and past."""
    lengths = [segment.length for segment in segments]
    outputs = []
    for parts in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        length, mask = q.shape[2], None
        if window is not None and window < length:
            at = torch.arange(length)
            mask = (at <= at.unsqueeze(1)) & (at > at.unsqueeze(1) - window)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.pointwise.reference.rotate`."""
    width = 2 * cos.shape[-1]
    x1, x2 = x[..., : width // 2], x[..., width // 2 : width]
    turned = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    return torch.cat(turned if width == x.shape[-1] else (*turned, x[..., width:]), dim=-1)


def _no_function(activation: str) -> None:
    """See `kernels.pointwise.reference.gated`: without it, an activation function and a product follow each other."""
