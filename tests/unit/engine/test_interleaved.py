"""Launch orders that are not for this run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, Planning
from megatron_mux.errors import UserError
from megatron_mux.fusion.graphs.launch_order import LaunchOrder
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.distributed.test_engine_layouts import in_turns
from tests.end_to_end.families import lora
from tests.end_to_end.harness import Case, random_records


def test_a_launch_order_for_other_pieces_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    parallel = initialize(device="cpu")
    path = tiny_models.make(tmp_path, "llama", num_hidden_layers=3)
    backbone = Backbone.load(path, parallel, torch.float64)
    names = ("above", "top")
    seconds = {"forward": (1.0,), "backward": (1.0,)}
    bucket = Bucket(tuple(HybridTask((name,)) for name in names), 1, **seconds)  # type: ignore[arg-type]
    plan = in_turns(Plan("auto", 1, (bucket,)), backbone.pieces)
    launch = (LaunchOrder("0101", plan.buckets[0].launch[0].backward),)
    plan = replace(plan, buckets=(replace(plan.buckets[0], launch=launch),))
    engine = Engine(backbone, parallel, Planning("auto", 1, given=plan))
    training = {"per_device_train_batch_size": 3, "max_steps": 4}
    records = random_records(6, 96, 4, 12, seed=0)
    engine.register_tasks([Case(name, lora(["q_proj"], r=4), training, records).task for name in names])
    with pytest.raises(
        UserError, match=r"buckets\[0\]\.launch\[0\]\.forward: the plan's launch order has 4 pieces"
    ):
        engine.step()
