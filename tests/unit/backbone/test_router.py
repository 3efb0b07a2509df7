"""Routing against the routers of transformers: the same experts, and weights equal to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_mux.backbone.experts.router import Router
from megatron_mux.backbone.registry import read_shape
from megatron_mux.batch.balancing import BalancedSequences, RouterLoadAccumulator, balanced_rows
from megatron_mux.kernels.attention.segments import Segment
from tests import tiny_models
from tests.reference.balanced import balancing_loss

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


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2-groups", "deepseek_v3"])
def test_balancing_loss_is_megatrons_for_each_sequence(name: str, tmp_path: Path) -> None:
    """A sequence in two chunks and a padded one of other tasks, between rows of a task without it that are NaN."""
    tiny_models.config(name).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.experts is not None
    routing, generator = shape.experts.routing, torch.Generator().manual_seed(1)
    router = Router(routing, shape.experts.count, shape.hidden)
    torch.nn.init.normal_(router.weight, std=0.2, generator=generator)
    if routing.bias:
        torch.nn.init.normal_(router.bias, std=0.2, generator=generator)
    x = torch.randn(30, shape.hidden, generator=generator)
    x[5:9] = float("nan")
    # Task, rows, sequence, tokens of it before: the second half of the first task's sequence 7 is in another chunk.
    chunks = (
        (
            Segment("a", 0, 5, 7, 0, True, 17),
            Segment("b", 5, 4, 0, 0, False, 4),
            Segment("c", 9, 9, 3, 0, False, 9),
        ),
        (Segment("a", 0, 12, 7, 5, False, 17),),
    )
    rows = (slice(0, 18), slice(18, 30))
    balanced = BalancedSequences({("a", 7): 0, ("c", 3): 1}, [17, 7], [0.5 / 4, 0.1])
    loads: RouterLoadAccumulator | None = None
    attached, inputs = [], []
    for segments, own in zip(chunks, rows, strict=True):
        arrays = balanced.arrays(segments, own.stop - own.start, {"b": 0, "c": 1, "a": 2})
        counted = balanced_rows({name: torch.from_numpy(array) for name, array in arrays.items()}, loads)
        loads = counted.loads
        given = x[own].clone().requires_grad_(True)
        routes = router(given, counted.in_layer(3, slice(None), None, again=False))
        assert torch.equal(routes.weights.nan_to_num(), router(given).weights.nan_to_num())
        attached.append(routes.weights)
        inputs.append(given)
    assert loads is not None
    for routed in reversed(attached):
        routed.backward(torch.zeros_like(routed))  # nothing but the loss's own gradient
    losses = torch.zeros(3, dtype=torch.float64)
    loads.add_losses(losses)
    for task, own_rows, weight in ((2, [*range(5), *range(18, 30)], 0.5 / 4), (1, list(range(9, 16)), 0.1)):
        alone = x[own_rows].requires_grad_(True)
        wanted = weight * balancing_loss(router.logits(alone), routing.top_k, routing.score)
        wanted.backward()
        assert losses[task].item() == pytest.approx(wanted.item(), rel=1e-5)
        found = torch.cat([given.grad for given in inputs if given.grad is not None])[own_rows]
        assert alone.grad is not None and alone.grad.norm() > 0
        torch.testing.assert_close(found, alone.grad, rtol=1e-4, atol=1e-7)
    assert losses[0] == 0
    assert inputs[0].grad is not None and (inputs[0].grad[16:] == 0).all(), "padding does not count"
