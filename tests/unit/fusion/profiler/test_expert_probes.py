"""What is timed of experts and of latent attention is what a run computes: as many pairs, on as many experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_mux import layout, runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.fusion.profiler import measure as module
from megatron_mux.fusion.profiler.expert_probes import ExpertProbes
from megatron_mux.fusion.profiler.layer_operators import layer_operators
from megatron_mux.fusion.profiler.measured_curves import operator_curves
from megatron_mux.fusion.profiler.probed_stage import ProbedStage
from megatron_mux.fusion.profiler.profile import Curve
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.runtime import Parallel
from tests.tiny_models import make

ABOUT = {"device": "made-up", "kind": "cpu", "threads": 2}


@pytest.fixture(scope="module")
def alone() -> Iterator[Parallel]:
    yield runtime.initialize(device="cpu")
    runtime.shutdown()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_profile_has_every_curve(
    name: str, alone: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a roofline, and nothing else: the planner asks for the same ones."""
    monkeypatch.setattr(module, "_TURN_SECONDS", 1e-9)  # each probe once
    backbone = Backbone.load(make(tmp_path, name), alone)
    found = module.measure(backbone, ABOUT, 32, rounds=1)
    estimated = roofline(backbone.shape, ABOUT, 4, most_tokens=32)
    assert set(layer_operators(backbone.shape)) <= set(found.curves)
    names = ({curve.rpartition(":")[0] or curve for curve in own.curves} for own in (found, estimated))
    measured, estimates = ({n for n in own if not n.startswith("attention")} for own in names)
    assert measured == estimates
    timed = ("router", "experts_fc1", "experts_activation", "experts_fc2")
    assert all(min(found.curves[own].forward) > 0 for own in timed)
    assert all(min(found.curves[own].backward) > 0 for own in timed)


def test_experts_have_as_many_pairs_each(alone: Parallel, tmp_path: Path) -> None:
    backbone = Backbone.load(make(tmp_path, "mixtral"), alone)
    stage = ProbedStage(backbone, 64)
    experts = ExpertProbes(stage)
    pairs = experts.pairs(experts.given(stage.batch(50, tasks=2)))
    assert pairs.groups.counts == (20,) * 5
    of_task = Counter[int]()
    for _, slot, start, stop in pairs.groups.groups:
        of_task[slot] += stop - start
    assert of_task == {0: 50, 1: 50}


def test_a_half_selects_evenly_with_its_router_s_weights(alone: Parallel, tmp_path: Path) -> None:
    backbone = Backbone.load(make(tmp_path, "deepseek_v3"), alone)
    stage = ProbedStage(backbone, 64)
    experts = ExpertProbes(stage)
    seen = []
    for layer in stage.routed:
        layer.mlp.observe = lambda routes, slots: seen.append(routes)
    (half,) = (probe for probe in experts.operators(64) if probe.name == "experts_half")
    output, (x,) = half.make()()
    (gradient,) = torch.autograd.grad(output, [x], torch.ones_like(output))
    assert gradient.abs().sum() > 0
    assert len(seen) == len(stage.stacks["experts"])
    for routes in seen:
        counts = Counter(routes.experts.flatten().tolist())
        assert len(counts) == 8 and max(counts.values()) - min(counts.values()) <= 2
        assert routes.weights.requires_grad
    with layout.activate(stage.batch(64)):
        own = stage.routed[0].mlp.route(x.detach()[:, 0])[0]
    assert not torch.equal(own.experts, seen[0].experts), "by itself it selects others"


def test_halves_are_told_apart_on_the_rows_that_they_had(alone: Parallel, tmp_path: Path) -> None:
    """A second for each row of a rank: two tensor ranks divide norms, routers and experts, not products."""
    shape = Backbone.load(make(tmp_path, "deepseek_v2"), alone).shape

    def of(slope: float) -> Curve:
        return Curve((32, 64), (32 * slope, 64 * slope), (64 * slope, 128 * slope))

    halved = ("norm", "router")
    timed = {
        name: of(0.5 if name in halved else 1.0) for name in layer_operators(shape) if "glue" not in name
    }
    products = len(shape.attention_ops)
    timed["attention:64:0"], timed["attention:32:0"] = of(1.0), of(1.0)
    attended = timed["attention:64:0"].at(1)[0]
    timed["attention_half"] = of(
        4 * (products + 2 + 7 + attended / 64)
    )  # a norm of all rows, and rotary; 7 of glue
    timed["mlp_half"] = of(4 * (1 + 3 + 7))
    timed["experts_half"] = of(3 * (2 * 0.5 + 3 * 0.5 + 3 + 7))  # shared experts had a rank's own rows
    curves = operator_curves(timed, shape, {"attention": 4, "mlp": 4, "experts": 3}, divided=2)
    for half in ("attention", "mlp", "experts"):
        assert curves[f"glue_{half}"].at(64)[0] == pytest.approx(7 * 64), half
