"""What one family of Hugging Face checkpoints says about itself: names of its tensors, fields of its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.layout import BaseOpName


@dataclass(frozen=True)
class Module:
    """A linear module of the Hugging Face model that lies within a BaseOp.

    Attributes:
        path: Within the layer: `self_attn.q_proj`.
        roles: What its output holds, in order: `q`, `k`, `v`; `gate`, `up`; `fc`; `out`.
    """

    path: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """Where a family keeps its tensors. Paths within a layer are relative to it.

    Attributes:
        base: Prefix that checkpoints of the bare model lack (`model.`).
        layer: Path of a layer, with `{}` for its index.
        embedding, final_norm, head: Modules of the embedding, the last norm and the output layer.
        positions: Module of the learned positions, if any.
        input_norm, mlp_norm: Norms before attention and before the MLP.
        q_norm, k_norm: Norms of queries and keys, if any.
        ops: The modules of each BaseOp.
        transposed: Weights are stored `[in, out]` (GPT-2's Conv1D).
        ignorable: Regular expressions of stored tensors that hold nothing learned.
    """

    base: str
    layer: str
    embedding: str
    final_norm: str
    input_norm: str
    mlp_norm: str
    ops: Mapping[BaseOpName, tuple[Module, ...]]
    head: str = "lm_head"
    positions: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    transposed: bool = False
    ignorable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fields:
    """How a family's config fields are treated; a field named nowhere is refused unless it is empty.

    Attributes:
        used: Read by the family's `shape`.
        ignored: Without effect on what we compute (dropout of the backbone, caching, other heads).
        fixed: Fields that must have one of the values given.
    """

    used: frozenset[str]
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A family: one mapping file in `families/` each.

    Attributes:
        model_type: As in config.json.
        names: Where its tensors are.
        fields: How its config fields are treated.
        shape: Reads the config (defaults filled in); raises `UserError` by `config.refuse`.
    """

    model_type: str
    names: Names
    fields: Fields
    shape: Callable[[Mapping[str, Any]], BackboneShape]
