"""DeepSeek-V2: softmax scores over all experts, chosen among the groups whose best expert scores highest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_mux.backbone.config import Family, refuse
from megatron_mux.backbone.families import _deepseek
from megatron_mux.expert_shape import Routing
from megatron_mux.shape import BackboneShape


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    method = full["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        refuse("topk_method", method, "greedy or group_limited_greedy")
    groups, best = (1, 1) if method == "greedy" else _deepseek.check_groups(full)
    routing = Routing(
        top_k=_deepseek.size(full, "num_experts_per_tok"),
        normalised=False,
        scale=float(full["routed_scaling_factor"]),
        groups=groups,
        top_groups=best,
        fp32_product=True,
    )
    return _deepseek.shape(full, routing, interleaved=True, wide_rotation=True)


FAMILY = Family(
    shape=_shape,
    used=_deepseek.USED | {"topk_method"},
    ignored=_deepseek.IGNORED,
    # transformers leaves norm_topk_prob out, DeepSeek's own code does not.
    fixed={**_deepseek.FIXED, "norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
)
