"""The engine computes with the kernels that its plans name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_mux.adapters import base_op
from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, Planning
from megatron_mux.kernels.low_rank.choice import KernelName, kernels_for
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.end_to_end.families import lora
from tests.end_to_end.harness import Case, random_records


def test_the_engine_computes_with_the_kernels_of_its_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[KernelName | None] = []

    def spy(x: Tensor, chosen: KernelName | None = None) -> object:
        asked.append(chosen)
        return kernels_for(x, chosen)

    monkeypatch.setattr(base_op, "kernels_for", spy)
    parallel = initialize(device="cpu")
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama"), parallel, torch.float32)
    planning = Planning("spatial", 1, kernels=(("linear_qkv", "loop"), ("linear_fc1", "triton")))
    engine = Engine(backbone, parallel, planning)
    case = Case("one", lora("all-linear"), {"max_steps": 2}, random_records(8, 64, 8, 16, 0))
    engine.register_tasks([case.task])
    engine.step()
    layers = backbone.shape.layers
    assert asked == ["loop", None, "triton", None] * layers, "qkv, proj, fc1, fc2 of each layer"
