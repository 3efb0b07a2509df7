"""A backbone of ours as the closed forms see it, from its shape alone."""

from __future__ import annotations

from megatron_mux.base_ops import BASE_OPS, COLUMN_PARALLEL
from megatron_mux.memory.forms.architecture import Architecture, Unit
from megatron_mux.shape import BackboneShape


def architecture_of(shape: BackboneShape) -> Architecture:
    """The architecture of a backbone, without a model of `transformers`; its own dropout is off."""
    vocabulary = shape.vocab * shape.hidden
    return Architecture(
        model_type=shape.family,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        gated=shape.gated,
        activation=shape.activation,
        rms_norm=shape.norm == "RMSNorm",
        rotary=any(shape.ropes),
        experts=1,
        experts_per_token=1,
        vocabulary=shape.vocab,
        tied=shape.tied,
        layers=(_layer(shape),) * shape.layers,
        embedding=Unit(divided=vocabulary, copied=shape.learned_positions * shape.hidden),
        head=Unit(divided=0 if shape.tied else vocabulary),
        final=Unit(copied=_norm(shape)),
        qk_norm=shape.qk_norm,
        output_norms=shape.output_norms,
        rotations=len({rope for rope in shape.ropes if rope is not None}),
    )


def _layer(shape: BackboneShape) -> Unit:
    names = shape.names
    divided, copied = 0, len(names.layer_norms) * _norm(shape) + len(names.head_norms) * shape.head_dim
    for op in BASE_OPS:
        divided += shape.in_features(op) * shape.out_features(op)
        if shape.biases[op]:
            bias = shape.out_features(op)
            divided, copied = (divided + bias, copied) if op in COLUMN_PARALLEL else (divided, copied + bias)
    return Unit(divided, copied)


def _norm(shape: BackboneShape) -> int:
    """Values of a norm of hidden states."""
    return shape.hidden * (2 if shape.norm == "LayerNorm" else 1)
