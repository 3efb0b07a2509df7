"""The operators of a layer, as a profile has curves of them, in the order of the forward pass.

`glue_*` is what a half layer takes beyond the operators in it: residual additions, views, the framework itself.
"""

from __future__ import annotations

from megatron_mux.base_ops import ATTENTION_OPS, EXPERT_OPS, LATENT_OPS, MLP_OPS, SHARED_OPS, BaseOpName
from megatron_mux.shape import BackboneShape

ORDER: tuple[BaseOpName, ...] = (
    ATTENTION_OPS[0],
    *LATENT_OPS,
    ATTENTION_OPS[1],
    *MLP_OPS,
    *SHARED_OPS,
    *EXPERT_OPS,
)
"""All BaseOps in the order in which a layer computes those that it has."""


def attention_operators(shape: BackboneShape) -> tuple[str, ...]:
    """Those of the half layer with attention; core attention has curves by sequence."""
    *before, projection = shape.attention_ops
    return ("norm", *before, "rotary", projection, "glue_attention")


def mlp_operators(shape: BackboneShape, experts: bool) -> tuple[str, ...]:
    """Those of the other half of a layer, without messages.

    Args:
        shape: The backbone's.
        experts: Whether the layer has experts.
    """
    if not experts:
        return ("norm", "linear_fc1", "activation", "linear_fc2", "glue_mlp")
    assert shape.experts is not None
    shared = ("shared_fc1", "shared_activation", "shared_fc2") if shape.experts.shared_ffn else ()
    return ("norm", "router", *shared, "experts_fc1", "experts_activation", "experts_fc2", "glue_experts")


def base_ops(shape: BackboneShape) -> tuple[BaseOpName, ...]:
    """The BaseOps that some layer of a backbone has."""
    found = {op for layer in range(shape.layers) for op in shape.ops(layer)}
    return tuple(op for op in ORDER if op in found)


def layer_operators(shape: BackboneShape) -> tuple[str, ...]:
    """All operators of the layers of a backbone, each once."""
    kinds = {shape.has_experts(layer) for layer in range(shape.layers)}
    halves = [attention_operators(shape), *(mlp_operators(shape, own) for own in sorted(kinds))]
    return tuple(dict.fromkeys(operator for half in halves for operator in half))


def below(shape: BackboneShape, op: BaseOpName) -> tuple[str, ...]:
    """The operators without a backward pass in the layer of the lowest adapter.

    Args:
        shape: The backbone's.
        op: The BaseOp that has it.
    """
    own = attention_operators(shape)
    if op in own:
        return own[: own.index(op) + 1]
    mlp = mlp_operators(shape, experts=op in (*SHARED_OPS, *EXPERT_OPS))
    return (*own, *mlp[: mlp.index(op) + 1])
