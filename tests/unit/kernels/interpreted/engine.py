"""An engine that computes adapters and optimizer steps by Triton kernels. Run by `test_triton_interpreted.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.adapters import base_op
from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import step_runner
from megatron_mux.engine.updates import GroupedUpdate
from megatron_mux.kernels.low_rank.triton import TritonKernels
from megatron_mux.kernels.update import triton as triton_update
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.end_to_end.families import FAMILIES, bottleneck, ia3, lora, vera
from tests.end_to_end.harness import Case, assert_close, random_records, train
from tests.reference import solo

SECTIONS: dict[str, dict[str, Any]] = {
    "everywhere": lora("all-linear", r=3, lora_dropout=0.1),
    "vera": vera(["k_proj", "up_proj"], save_projection=False),
    "bottleneck": bottleneck(["o_proj", "down_proj"], non_linearity="gelu", scaling=0.7),
    "factors": ia3(FAMILIES["llama"]),
}


@pytest.mark.filterwarnings("ignore:Specified to not save vera_A")
def test_engine_trains_as_with_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list[str]
) -> None:
    path = tiny_models.make(tmp_path, "llama", num_hidden_layers=1)
    parallel = initialize(device="cpu")
    backbone = Backbone.load(path, parallel, torch.float32)
    training = {"per_device_train_batch_size": 2, "max_steps": 12, "learning_rate": 1e-2}
    cases = [
        Case(
            name,
            section,
            {**training, "seed": i},
            random_records(4, 96, 4, 24, seed=i),
            solo.random_adapter(path, section, seed=i, dtype=torch.float32),
        )
        for i, (name, section) in enumerate(SECTIONS.items())
    ]
    wanted = train(backbone, parallel, cases, 2)
    monkeypatch.setattr(base_op, "kernels_for", lambda *_: TritonKernels)
    monkeypatch.setattr(step_runner, "update_of", lambda own: GroupedUpdate(own, triton_update))
    found = train(backbone, parallel, cases, 2)
    for name in SECTIONS:
        for ours, theirs in zip(found.losses(name), wanted.losses(name), strict=True):
            assert abs(ours - theirs) <= 1e-6 * abs(theirs)
        assert_close(found.tensors[name], wanted.tensors[name], 1e-4, name)
    kernels = {"weight_gradient_kernel", "activation_kernel", "scale_kernel", "factor_gradient_kernel"}
    assert kernels | {"_row_sums", "_update"} <= set(launches)
