"""Megatron's flags for a model's shape, and the value that each must have for a given backbone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mux.shape import BackboneShape, Rope


@dataclass(frozen=True)
class ShapeFlag:
    """A flag that describes the model.

    Attributes:
        type: Converts its value; `bool` for a flag without one.
        actual: The value that it must have for a backbone.
    """

    type: Callable[[str], Any]
    actual: Callable[[BackboneShape], Any]


def _positions(shape: BackboneShape) -> str:
    return "rope" if any(shape.ropes) else "learned_absolute"


def _of_ropes(shape: BackboneShape, value: Callable[[Rope], float | None]) -> float | None:
    """A value of the rotary embedding of all layers; None if a layer has none, or they differ."""
    values = {value(rope) if rope else None for rope in shape.ropes}
    return values.pop() if len(values) == 1 else None


def _llama3_factor(shape: BackboneShape) -> float | None:
    """By how much Llama 3's scaling stretches wavelengths; None if a layer's are not."""
    return _of_ropes(shape, lambda rope: rope.factor if rope.rope_type == "llama3" else None)


def _no_bias(shape: BackboneShape) -> bool:
    return not any(bias for op, bias in shape.biases.items() if op != "linear_qkv")


SHAPE_FLAGS: Mapping[str, ShapeFlag] = {
    "--num-layers": ShapeFlag(int, lambda s: s.layers),
    "--hidden-size": ShapeFlag(int, lambda s: s.hidden),
    "--ffn-hidden-size": ShapeFlag(int, lambda s: s.ffn),
    "--num-attention-heads": ShapeFlag(int, lambda s: s.heads),
    "--group-query-attention": ShapeFlag(bool, lambda s: s.kv_heads != s.heads),
    "--num-query-groups": ShapeFlag(int, lambda s: s.kv_heads),
    "--kv-channels": ShapeFlag(int, lambda s: s.head_dim),
    "--max-position-embeddings": ShapeFlag(int, lambda s: s.max_positions),
    "--vocab-size": ShapeFlag(int, lambda s: s.vocab),
    "--normalization": ShapeFlag(str, lambda s: s.norm),
    "--norm-epsilon": ShapeFlag(float, lambda s: s.norm_eps),
    "--position-embedding-type": ShapeFlag(str, _positions),
    "--rotary-base": ShapeFlag(float, lambda s: _of_ropes(s, lambda rope: rope.rope_theta)),
    "--rotary-percent": ShapeFlag(float, lambda s: _of_ropes(s, lambda rope: rope.partial_rotary_factor)),
    "--use-rotary-position-embeddings": ShapeFlag(bool, lambda s: any(s.ropes)),
    "--no-position-embedding": ShapeFlag(bool, lambda s: any(s.ropes)),
    "--use-rope-scaling": ShapeFlag(bool, lambda s: _llama3_factor(s) is not None),
    "--rope-scaling-factor": ShapeFlag(float, _llama3_factor),
    "--apply-layernorm-1p": ShapeFlag(bool, lambda s: s.norm_offset == 1),
    "--swiglu": ShapeFlag(bool, lambda s: s.gated and s.activation in ("silu", "swish")),
    "--qk-layernorm": ShapeFlag(bool, lambda s: s.qk_norm),
    "--untie-embeddings-and-output-weights": ShapeFlag(bool, lambda s: not s.tied),
    "--disable-bias-linear": ShapeFlag(bool, _no_bias),
    "--add-qkv-bias": ShapeFlag(bool, lambda s: bool(s.biases["linear_qkv"])),
    "--num-experts": ShapeFlag(int, lambda s: s.experts and s.experts.count),
    "--moe-ffn-hidden-size": ShapeFlag(int, lambda s: s.experts and s.experts.ffn),
    "--moe-shared-expert-intermediate-size": ShapeFlag(int, lambda s: s.experts and s.experts.shared_ffn),
    "--moe-router-topk": ShapeFlag(int, lambda s: s.experts and s.experts.routing.top_k),
    "--moe-router-score-function": ShapeFlag(str, lambda s: s.experts and s.experts.routing.score),
    "--moe-router-topk-scaling-factor": ShapeFlag(float, lambda s: s.experts and s.experts.routing.scale),
    "--moe-router-num-groups": ShapeFlag(int, lambda s: s.experts and s.experts.routing.groups),
    "--moe-router-group-topk": ShapeFlag(int, lambda s: s.experts and s.experts.routing.top_groups),
    "--moe-router-enable-expert-bias": ShapeFlag(bool, lambda s: bool(s.experts and s.experts.routing.bias)),
    "--multi-latent-attention": ShapeFlag(bool, lambda s: s.latent is not None),
    "--q-lora-rank": ShapeFlag(int, lambda s: s.latent and s.latent.query_rank),
    "--kv-lora-rank": ShapeFlag(int, lambda s: s.latent and s.latent.rank),
    "--qk-head-dim": ShapeFlag(int, lambda s: s.latent and s.latent.plain),
    "--qk-pos-emb-head-dim": ShapeFlag(int, lambda s: s.latent and s.latent.rotated),
    "--v-head-dim": ShapeFlag(int, lambda s: s.latent and s.latent.value),
}
"""The supported shape flags, by name."""
