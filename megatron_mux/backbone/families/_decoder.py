"""The common base of all families: a decoder with learned positions and plain MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron_mux.backbone import config as read
from megatron_mux.base_ops import BaseOpName
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import Linear, Names

USED = frozenset({"hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"})
"""Fields that `shape` reads for every family; configs with other names (GPT-2's n_embd) have these as aliases."""


def separate_qkv(attention: str) -> tuple[Linear, ...]:
    """Separate modules for q, k and v under the path of the attention within a layer."""
    return tuple(Linear(f"{attention}.{role}_proj", (role,)) for role in ("q", "k", "v"))


def biases(*, qkv: bool, proj: bool, mlp: bool) -> dict[BaseOpName, bool]:
    """Which BaseOps have a bias; both of the MLP or none."""
    return {"linear_qkv": qkv, "linear_proj": proj, "linear_fc1": mlp, "linear_fc2": mlp}


def shape(
    full: Mapping[str, Any],
    names: Names,
    *,
    ffn: int,
    activation_field: str,
    norm: Literal["RMSNorm", "LayerNorm"],
    norm_eps: float,
    biases: Mapping[BaseOpName, bool],
) -> BackboneShape:
    """A shape with attention over all earlier positions, scaled by the head size; each family replaces what differs.

    Args:
        names: Where the family keeps its tensors.
        ffn: Inner width of the MLP.
        activation_field: The field that names its activation function.
        norm: Kind of the norms.
        norm_eps: What they add to the variance.
        biases: Which BaseOps have a bias.

    Raises:
        UserError: Heads or an activation function that are not supported.
    """
    hidden, heads, layers = (
        int(full["hidden_size"]),
        int(full["num_attention_heads"]),
        int(full["num_hidden_layers"]),
    )
    # Families without fields for these two have them refused as unknown before.
    kv_heads = int(full.get("num_key_value_heads") or heads)
    read.divisible_heads(heads, kv_heads)
    size = read.head_dim(full, hidden, heads)
    return BackboneShape(
        family=str(full["model_type"]),
        names=names,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        ffn=int(ffn),
        vocab=int(full["vocab_size"]),
        padded_vocab=int(full["vocab_size"]),
        max_positions=int(full["max_position_embeddings"]),
        position_limit=int(full["max_position_embeddings"]),
        position_offset=0,
        norm=norm,
        norm_eps=float(norm_eps),
        activation=read.activation(activation_field, full[activation_field]),
        gated=False,
        tied=bool(full["tie_word_embeddings"]),
        biases=biases,
        ropes=(None,) * layers,
        windows=(None,) * layers,
        scales=(size**-0.5,) * layers,
        config=full,
        padding_token=full.get("pad_token_id"),
    )
