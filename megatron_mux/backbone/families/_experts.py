"""What families with experts share: attention as in Llama, and experts instead of the MLP in some or all layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megatron_mux import expert_shape
from megatron_mux.backbone import config as read
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.base_ops import EXPERT_OPS, SHARED_OPS
from megatron_mux.expert_shape import ExpertNames, Experts, Routing
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import DefaultTargets, Linear, Names

IGNORED = like.IGNORED | {"output_router_logits", "router_aux_loss_coef"}
"""The balancing loss of pre-training. A task has one only if its `training.router_aux_loss_coef` asks for it."""


def names(base: Names, shared: str = "mlp.shared_experts") -> Names:
    """Names of a family with experts.

    Args:
        base: Of the family without them.
        shared: Path of the shared experts within a layer.
    """
    return replace(
        base,
        ops={
            **base.ops,
            "shared_fc1": (Linear(f"{shared}.gate_proj", ("gate",)), Linear(f"{shared}.up_proj", ("up",))),
            "shared_fc2": (Linear(f"{shared}.down_proj", ("out",)),),
            "experts_fc1": (Linear("mlp.experts.gate_up_proj", ("gate", "up")),),
            "experts_fc2": (Linear("mlp.experts.down_proj", ("out",)),),
        },
        targets=DefaultTargets(
            lora=expert_shape.TARGETS, ia3=("k_proj", "v_proj"), ia3_feedforward=(), bottleneck=("o_proj",)
        ),
    )


def with_experts(
    shape: BackboneShape,
    full: Mapping[str, Any],
    *,
    count: int,
    ffn: int,
    routing: Routing,
    names: ExpertNames,
    dense: Iterable[int] = (),
    shared_ffn: int = 0,
) -> BackboneShape:
    """Add experts to the shape of a family.

    Args:
        shape: Without them.
        count: Routed experts of a layer.
        ffn: Inner width of an expert.
        routing: How rows are routed.
        names: Where experts are kept.
        dense: Layers without experts.
        shared_ffn: Inner width of the shared experts; 0: there are none.

    Raises:
        UserError: The numbers do not fit.
    """
    if not 1 <= routing.top_k <= count:
        read.refuse("num_experts_per_tok", routing.top_k, f"a number from 1 to the {count} experts")
    if routing.groups > 1 and (count % routing.groups or not 1 <= routing.top_groups <= routing.groups):
        read.refuse("n_group", routing.groups, f"a divisor of the {count} experts, at least topk_group")
    biases = {**shape.biases, **dict.fromkeys((*SHARED_OPS, *EXPERT_OPS), False)}
    experts = Experts(count, int(ffn), int(shared_ffn), routing, frozenset(dense), names)
    return replace(shape, biases=biases, experts=experts)
