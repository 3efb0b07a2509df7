"""The curves of a profile that a layer's passes are made of, in the order of the forward pass.

Half layers were timed whole. One with experts has three parts, because messages lie between them: `router` is all of it
that is neither `shared` nor routed `experts`. BaseOps have curves of their own for what lies below the lowest adapter.
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


def mlp_operators(shape: BackboneShape, experts: bool) -> tuple[str, ...]:
    """Those of the half layer behind `attention_half`, without messages; core attention has curves by sequence.

    Args:
        experts: Whether the layer has experts.
    """
    if not experts:
        return ("mlp_half",)
    assert shape.experts is not None
    return ("router", "shared", "experts") if shape.experts.shared_ffn else ("router", "experts")


def base_ops(shape: BackboneShape) -> tuple[BaseOpName, ...]:
    """The BaseOps that some layer of a backbone has."""
    ops = {op for layer in range(shape.layers) for op in shape.ops(layer)}
    return tuple(op for op in ORDER if op in ops)


def layer_operators(shape: BackboneShape) -> tuple[str, ...]:
    """All curves of the layers of a backbone, each once."""
    kinds = sorted({shape.has_experts(layer) for layer in range(shape.layers)})
    second = [name for has_experts in kinds for name in mlp_operators(shape, has_experts)]
    return ("attention_half", *second, *base_ops(shape))


def below(shape: BackboneShape, op: BaseOpName) -> tuple[str, ...]:
    """The curves whose backward passes the layer of the lowest adapter does without.

    Of the part of the layer that has the adapter these are the products up to it: norms and activations take little.

    Args:
        op: The BaseOp that has it.
    """
    names: list[str] = []
    of_part: dict[str, tuple[BaseOpName, ...]] = {
        "mlp_half": MLP_OPS,
        "shared": SHARED_OPS,
        "experts": EXPERT_OPS,
    }
    for part in ("attention_half", *mlp_operators(shape, op in (*SHARED_OPS, *EXPERT_OPS))):
        ops = shape.attention_ops if part == "attention_half" else of_part.get(part, ())
        if op in ops:
            return (*names, *((part,) if op == ops[-1] else ops[: ops.index(op) + 1]))
        names.append(part)
    raise ValueError(f"{op}: no layer of the backbone has it")
