"""DeepSeek-V3: sigmoid scores; a bias, and the two best experts of each group, decide which are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_mux.backbone.config import Family, refuse
from megatron_mux.backbone.families import _deepseek
from megatron_mux.expert_shape import Routing
from megatron_mux.shape import BackboneShape


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    experts = _deepseek.size(full, "n_routed_experts")
    if experts < 2 * _deepseek.size(full, "n_group"):
        refuse("n_group", full["n_group"], f"groups of two of the {experts} experts at least")
    groups, best = _deepseek.check_groups(full)
    routing = Routing(
        top_k=_deepseek.size(full, "num_experts_per_tok"),
        score="sigmoid",
        normalised=bool(full["norm_topk_prob"]),
        scale=float(full["routed_scaling_factor"]),
        groups=groups,
        top_groups=best,
        group_score="two best",
        bias=True,
        fp32_product=True,
    )
    return _deepseek.shape(full, routing, interleaved=bool(full["rope_interleave"]), wide_rotation=False)


FAMILY = Family(
    shape=_shape,
    used=_deepseek.USED | {"rope_interleave"},
    ignored=_deepseek.IGNORED,
    fixed={**_deepseek.FIXED, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
)
