"""Routing against the routers of transformers: the same experts, and weights equal to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_mux.backbone.experts.router import Router
from megatron_mux.backbone.registry import read_shape
from tests import tiny_models

ROWS = 4096
ROUNDING = 1e-6
NAMES = ("deepseek_v2", "deepseek_v2-groups", "deepseek_v3", "deepseek_v3-one-group")


def near_ties(router: Router, x: Tensor) -> Tensor:
    """`[R]` bool: the rows in which rounding may decide between two experts, or two groups of them."""
    routing, ranking = router.routing, router.scores(x)
    if routing.bias:
        ranking = ranking + router.bias
    near = torch.zeros(len(x), dtype=torch.bool)
    if 1 < routing.groups != routing.top_groups:
        groups = ranking.unflatten(-1, (routing.groups, -1))
        best = (
            groups.topk(2 if routing.group_score == "two best" else 1)
            .values.sum(-1)
            .sort(descending=True)
            .values
        )
        near |= best[:, routing.top_groups - 1] - best[:, routing.top_groups] < ROUNDING
        ranking = router._in_best_groups(ranking)
    best = ranking.sort(descending=True).values
    return near | (best[:, routing.top_k - 1] - best[:, routing.top_k] < ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_routes_as_transformers_does(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_models.config(name).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.experts is not None
    theirs = tiny_models.build(name).model.layers[-1].mlp.gate
    ours = Router(shape.experts.routing, shape.experts.count, shape.hidden)
    ours.weight.data.copy_(theirs.weight)
    if shape.experts.routing.bias:
        ours.bias.data.copy_(theirs.e_score_correction_bias)
    x = torch.randn(ROWS, shape.hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    near = near_ties(ours, x)
    assert near.sum() <= 2, "of 4096 rows"
    found, (_, weights, experts) = ours(x), theirs(x)
    order, wanted = found.experts.sort(), experts.sort()
    assert torch.equal(order.values[~near], wanted.values[~near])
    assert found.weights.dtype == weights.dtype
    assert torch.equal(
        found.weights.gather(1, order.indices)[~near], weights.gather(1, wanted.indices)[~near]
    )
