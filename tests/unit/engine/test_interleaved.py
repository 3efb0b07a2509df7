"""Hybrid tasks in turns where only some layers are trained, and launch orders that are not for this run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mux.backbone.model import Backbone, Recompute
from megatron_mux.engine import Engine, Planning
from megatron_mux.errors import UserError
from megatron_mux.fusion.graphs.launch_order import LaunchOrder
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.distributed.test_engine_layouts import in_turns
from tests.end_to_end.families import lora
from tests.end_to_end.harness import Case, adapter, assert_close, random_records

LAYERS = 3
NAMES = ("above", "top")


def engine_of(path: Path, recompute: Recompute = "none", turns: bool = True, wrong: bool = False) -> Engine:
    parallel = initialize(device="cpu")
    backbone = Backbone.load(path, parallel, torch.float64, recompute)
    seconds = {"forward": (1.0,), "backward": (1.0,)}
    bucket = Bucket(tuple(HybridTask((name,)) for name in NAMES), 1, **seconds)  # type: ignore[arg-type]
    plan = Plan("auto", 1, (bucket,))
    if turns:
        plan = in_turns(plan, backbone.pieces)
    if wrong:
        launch = (LaunchOrder("0101", plan.buckets[0].launch[0].backward),)
        plan = replace(plan, buckets=(replace(plan.buckets[0], launch=launch),))
    engine = Engine(backbone, parallel, Planning("auto", 1, given=plan))
    training = {"per_device_train_batch_size": 3, "max_steps": 4, "learning_rate": 1e-2}
    targets = {"above": "layers.1.mlp.down_proj", "top": "layers.2.self_attn.q_proj"}
    engine.register_tasks(
        [
            Case(name, lora([targets[name]], r=4), training, random_records(6, 96, 4, 12, seed=i)).task
            for i, name in enumerate(NAMES)
        ]
    )
    return engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_models.make(tmp_path, "llama", num_hidden_layers=LAYERS)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_below_all_adapters_have_no_backward_pass(path: Path, recompute: Recompute) -> None:
    plain, turns = engine_of(path, recompute, turns=False), engine_of(path, recompute)
    for _ in range(3):
        wanted, found = plain.step(), turns.step()
        for name in NAMES:
            assert found[name].loss == pytest.approx(wanted[name].loss, rel=1e-12)
    assert turns.last_plan is not None and turns.last_plan.buckets[0].launch
    for name in NAMES:
        # Not to the bit: with one tensor rank Megatron's modules multiply another way while they communicate.
        assert_close(adapter(turns, name), adapter(plain, name), 1e-12, name)


def test_a_launch_order_for_other_pieces_is_refused_before_anything_is_computed(path: Path) -> None:
    engine = engine_of(path, wrong=True)
    with pytest.raises(
        UserError, match=r"buckets\[0\]\.launch\[0\]\.forward: the plan's launch order has 4 pieces"
    ):
        engine.step()
