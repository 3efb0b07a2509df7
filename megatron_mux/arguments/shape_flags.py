"""Megatron's flags for a model's shape, and the value that each must have for a given backbone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mux.shape import BackboneShape


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


def _rotary_base(shape: BackboneShape) -> float | None:
    """The base of all layers; None if they have none, or several."""
    bases = {rope.rope_theta if rope else None for rope in shape.ropes}
    return bases.pop() if len(bases) == 1 else None


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
    "--rotary-base": ShapeFlag(float, _rotary_base),
    "--swiglu": ShapeFlag(bool, lambda s: s.gated and s.activation in ("silu", "swish")),
    "--qk-layernorm": ShapeFlag(bool, lambda s: s.qk_norm),
    "--untie-embeddings-and-output-weights": ShapeFlag(bool, lambda s: not s.tied),
    "--disable-bias-linear": ShapeFlag(bool, _no_bias),
    "--add-qkv-bias": ShapeFlag(bool, lambda s: bool(s.biases["linear_qkv"])),
}
"""The supported shape flags, by name."""
