"""A master and three expert managers against transformers and against one process; and what they send."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_mux.backbone.checkpoint import Checkpoint
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_shape
from megatron_mux.batch.pack import pack
from megatron_mux.engine import Engine
from megatron_mux.expert_shape import Placement
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape
from tests.distributed.rendezvous import run_under_the_rules
from tests.distributed.test_expert_layouts import Layout, assert_alike, cases_of, of_latent_attention, train
from tests.distributed.test_experts import batch_of, reference
from tests.distributed.test_nccl_rules import Scenario, run
from tests.end_to_end.harness import assert_close
from tests.logits import all_logits
from tests.traffic import MESSAGES, Traffic, counted

Joined = Callable[..., Parallel]


def uneven(shape: BackboneShape) -> Placement:
    """Experts anywhere on three managers; the last layer's on one of them."""
    assert shape.experts is not None
    drawn = random.Random(5)
    layers = {
        layer: tuple((drawn.choice((1, 1, 2, 3)),) for _ in range(shape.experts.count))
        for layer in shape.experts.layers(shape.layers)
    }
    layers[shape.layers - 1] = ((2,),) * shape.experts.count
    return Placement(4, layers)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "recompute"),
    [("mixtral", "none"), ("mixtral", "full"), ("qwen3_moe", "none"), ("deepseek_v3", "full")],
)
def test_agrees_with_transformers_and_counts_its_bytes(
    name: str, recompute: Any, joined: Joined, model_of: Callable[[str], Path], stages: Any
) -> None:
    path, parallel = model_of(name), joined(1, 1, managers=3)
    shape = read_shape(path)
    assert shape.experts is not None
    placement = uneven(shape)
    backbone = Backbone.load(path, parallel, torch.float64, recompute, placement=placement)
    backbone.lowest_adapter = lambda _: 0
    none = pack([], ("first", "second"), {"first": 0, "second": 0}).to()
    batch = batch_of(shape, parallel, 0) if parallel.experts.holds_rows else none
    passes_ = stages(backbone, batch)
    embedded = backbone.embed(batch).clone().requires_grad_(True)
    with counted(backbone) as traffic:
        hidden = passes_.forward(embedded)
        loss, _ = backbone.loss(hidden, batch)
        found = all_logits(backbone, batch, hidden) if batch.rows else None
        gradient = passes_.backward(loss)
    if found is not None:
        logits, wanted = reference(path, batch)
        assert (found - logits).abs().max() <= 1e-9
        assert (gradient.squeeze(1) - wanted).norm() <= 1e-9 * wanted.norm()
    check_traffic(backbone, traffic, placement, recompute == "full")


def check_traffic(
    backbone: Backbone, of_layers: dict[int, Traffic], placement: Placement, twice: bool
) -> None:
    """Each message has as many bytes as its rows; both ends agree."""
    shape, ranks = backbone.shape, backbone.parallel.experts
    assert shape.experts is not None
    top_k, number = shape.experts.routing.top_k, 8
    width = {
        "rows": shape.hidden * number + top_k * (number + 4) + 4,
        "results": shape.hidden * number,
        "result gradients": shape.hidden * number,
        "row gradients": (shape.hidden + top_k) * number,
    }
    for layer, traffic in of_layers.items():
        everyones: list[Any] = [None] * ranks.size
        dist.all_gather_object(everyones, (traffic.sent, traffic.received))
        for message, (sender, receiver) in product(MESSAGES, product(range(ranks.size), repeat=2)):
            assert everyones[sender][0][message][receiver] == everyones[receiver][1][message][sender]
        if not ranks.holds_rows:
            every = (*traffic.sent.values(), *traffic.received.values())
            assert all((size[1:] == 0).all() for size in every)
            continue
        rows = traffic.received["row gradients"] // width["row gradients"]
        assert rows.sum() > 0
        assert all(rows[rank] == 0 for rank in range(1, 4) if not placement.held(layer, rank))
        for message, found, times in (
            ("rows", traffic.sent, 1 + twice),
            ("results", traffic.received, 1 + twice),
            ("result gradients", traffic.sent, 1),
            ("row gradients", traffic.received, 1),
        ):
            assert found[message].tolist() == (rows * width[message] * times).tolist(), message


def test_each_part_is_on_one_process(
    joined: Joined, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the backbone and of adapters; a manager reads nothing but its experts."""
    path, parallel = model_of("mixtral"), joined(1, 1, managers=3)
    read: set[str] = set()
    chunks = Checkpoint.read_chunks

    def note(self: Checkpoint, name: str, *arguments: Any) -> Any:
        read.add(name)
        return chunks(self, name, *arguments)

    monkeypatch.setattr(Checkpoint, "read_chunks", note)
    backbone = Backbone.load(path, parallel, placement=uneven(read_shape(path)))
    experts = {name for name in read if ".experts." in name}
    assert experts == (set() if parallel.experts.holds_rows else read)
    engine = Engine(backbone, parallel)
    engine.register_tasks([case.task for case in cases_of(96)])
    adapters = engine.adapters.tasks
    held = {name: sum(p.value.numel() for p in own.parameters) for name, own in adapters.items()}
    everyones: list[Any] = [None] * 4
    dist.all_gather_object(everyones, (held, sorted(read)))
    assert len(set().union(*(names for _, names in everyones))) == sum(len(names) for _, names in everyones)
    for name, own in adapters.items():
        trained = sum(math.prod(tensor.shape) for tensor in own.tensors.values() if tensor.trained)
        assert sum(sizes[name] for sizes, _ in everyones) == trained
        assert "experts" in name or parallel.experts.holds_rows or not held[name]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_adapters_come_out_as_in_one_process(
    family: str, joined: Joined, model_of: Callable[[str], Path]
) -> None:
    path = model_of(family)
    shape = read_shape(path)
    cases = cases_of(96)
    if family == "deepseek_v3":
        cases = [of_latent_attention(case) for case in cases]
    wanted = train(joined, path, cases, Layout(1, 1, 1))
    for own_layout in LAYOUTS if family == "mixtral" else LAYOUTS[1:2]:
        placement = uneven(shape) if own_layout.scattered else None
        assert_alike(train(joined, path, cases, own_layout, placement), wanted, 1e-10, own_layout)


LAYOUTS = [
    Layout(1, 1, 1, managers=3),
    Layout(1, 1, 1, managers=3, scattered=True, policy="temporal"),
    Layout(1, 1, 1, managers=3, scattered=True, recompute="full"),
]


def test_a_task_that_diverges_changes_no_neighbour(joined: Joined, model_of: Callable[[str], Path]) -> None:
    """Nor does it stop them: its gradients are not finite on managers and on the master."""
    path, layout_ = model_of("mixtral"), LAYOUTS[0]
    experts = next(case for case in cases_of(96) if case.name == "experts")
    own, diverging = (
        replace(experts, name=name, training={**experts.training, "learning_rate": rate, "optim": "sgd"})
        for name, rate in (("own", 0.1), ("diverging", 1e200))
    )
    alone, wanted = train(joined, path, [own], layout_)
    beside, found = train(joined, path, [own, diverging], layout_)
    assert not all(map(math.isfinite, beside[-1].get("diverging", (math.nan,)))), "it did not diverge"
    for theirs, ours in zip(alone, beside, strict=True):
        assert ours["own"] == pytest.approx(theirs["own"], rel=1e-10)
    if found["own"] is not None:
        assert_close(found["own"], wanted["own"] or {}, 1e-10, "own")


def test_messages_follow_the_rules_of_nccl(joined: Joined, model_of: Callable[[str], Path]) -> None:
    parallel = joined(1, 1, managers=3)
    scenario = Scenario("temporal", pipeline=1, then="evaluate", tries_plans=True)
    rules, problem = run_under_the_rules(partial(run, scenario, parallel, model_of("mixtral")))
    assert not problem, problem
    assert rules.met["send"] + rules.met["recv_"] > 100
