"""What is timed of experts and of latent attention is what a run computes: as many pairs, on as many experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import activate
from megatron_mux.fusion.profiler import measure as module
from megatron_mux.fusion.profiler.expert_probes import ExpertProbes
from megatron_mux.fusion.profiler.layer_operators import layer_operators
from megatron_mux.fusion.profiler.measured_curves import profile_curves
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
    timed = (found.curves[own] for own in ("mlp_half", "experts_fc1", "experts_fc2", "linear_proj"))
    assert all(min(curve.forward) > 0 < min(curve.backward) for curve in timed)


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
    for layer in stage.stacks["experts"]:
        layer.mlp.observe = lambda routes, slots: seen.append(routes)
    (half,) = (probe for probe in experts.parts(64) if probe.name == "experts_half")
    output, (x,) = half.make()()
    (gradient,) = torch.autograd.grad(output, [x], torch.ones_like(output))
    assert gradient.abs().sum() > 0
    assert len(seen) == len(stage.stacks["experts"])
    for routes in seen:
        counts = Counter(routes.experts.flatten().tolist())
        assert len(counts) == 8 and max(counts.values()) - min(counts.values()) <= 2
        assert routes.weights.requires_grad
    with activate(stage.batch(64)):
        own = stage.stacks["experts"][0].mlp.route(x.detach()[:, 0])[0]
    assert not torch.equal(own.experts, seen[0].experts), "by itself it selects others"


def of(slope: float) -> Curve:
    """So many seconds a row, twice that backward."""
    return Curve((32, 64), (32 * slope, 64 * slope), (64 * slope, 128 * slope))


@pytest.mark.parametrize(("experts", "rest"), [(3.0, 2.0), (9.0, 0.0)])
def test_the_parts_of_a_half_layer_add_up_to_it(experts: float, rest: float) -> None:
    """Two tensor ranks divide its rows, also those of shared experts; what parts took by themselves never adds more."""
    timed = {
        "attention_half": of(4.0),
        "attention:32:0": Curve((1,), (0.0,), (0.0,)),
        "experts_half": of(
            3 * (2.0 + 1.0 + 3.0)
        ),  # three layers: the rest, half a row of shared experts, routed ones
        "experts": of(experts),
        "shared": of(2.0),
    }
    curves = profile_curves(timed, {"attention": 4, "experts": 3}, divided=2)
    at = {name: curves[name].at(64) for name in ("router", "experts", "shared")}
    shared = timed["shared"].at(32)
    assert at["router"] == pytest.approx((rest * 64, rest * 128))
    whole = [at["router"][way] + at["experts"][way] + shared[way] for way in range(2)]
    assert whole == pytest.approx([6 * 64, 6 * 128])
    assert curves["attention_half"].at(64)[0] == pytest.approx(64)


def test_an_adapter_never_takes_less_than_nothing() -> None:
    """Its seconds are a difference of two figures, each with its noise."""
    timed = {
        "attention_half": of(4.0),
        "attention:32:0": Curve((1,), (0.0,), (0.0,)),
        "LORA:linear_qkv:8": of(-1.0),
    }
    curves = profile_curves(timed, {"attention": 4}, divided=1)
    assert curves["LORA:linear_qkv:8"] == of(0.0)
