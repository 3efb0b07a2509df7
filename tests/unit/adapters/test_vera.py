"""VeRA's fixed matrices: drawn as peft draws them, saved or drawn again, shared by all layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_mux import runtime
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.backbone.model import Backbone
from megatron_mux.runtime import Parallel
from tests.tiny_models import make
from tests.unit.adapters.toy import adapter_tensors, attached, task


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    yield runtime.initialize(device="cpu")
    runtime.shutdown()


def vera(**fields: Any) -> Any:
    usual: dict[str, Any] = {"peft_type": "VERA", "r": 5, "target_modules": ["q_proj", "down_proj"]}
    return task("t", **(usual | fields))


@pytest.mark.parametrize("key", [0, 7])
def test_matrices_are_those_of_peft(key: int, parallel: Parallel, tmp_path: Path) -> None:
    path = make(tmp_path, "llama")
    backbone = Backbone.load(path, parallel)
    adapters = AdapterSet(Host(backbone.base_ops(), parallel, backbone.dtype, backbone.shape))
    spec = vera(projection_prng_key=key)
    ours = {p.key: p.value for p in adapters.add(spec, 4).fixed}
    config = peft.VeraConfig(
        task_type="CAUSAL_LM", r=5, target_modules=["q_proj", "down_proj"], projection_prng_key=key
    )
    theirs = peft.get_peft_model_state_dict(
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
    )
    assert ours.keys() == {"base_model.vera_A", "base_model.vera_B"}
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) and not value.requires_grad
    adapters.remove("t")


@pytest.mark.parametrize("save", [True, False])
def test_matrices_come_from_the_file_if_they_are_saved(save: bool, parallel: Parallel) -> None:
    toy, adapters = attached(parallel)
    spec = vera(save_projection=save)
    initial = adapter_tensors(spec, toy.shape)
    adapter = adapters.add(spec, 4, initial)
    for p in adapter.fixed:
        assert torch.equal(p.value, initial[p.key]) == save


def test_layers_share_the_matrices(parallel: Parallel) -> None:
    toy, adapters = attached(parallel)
    of_layers: dict[int, set[int]] = {}
    for op, at in adapters.add(vera(), 4).at.items():
        parts = [part for t in at.low_rank(0) for part in (t.down, t.up)]
        of_layers.setdefault(op // 4, set()).update(part.untyped_storage().data_ptr() for part in parts)
    assert len(of_layers) == toy.shape.layers and of_layers[0] == of_layers[1]
    adapters.remove("t")
