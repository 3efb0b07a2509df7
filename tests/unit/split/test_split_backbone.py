"""A backbone whose body is on a server trains as the whole one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.engine import Engine
from megatron_mux.split.client.backbone import load_ends
from tests import tiny_models
from tests.end_to_end.harness import Case, adapter, assert_close
from tests.unit.split.fake_server import FakeServer
from tests.unit.split.splitting import ALONE, case, split_engine

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
    "bottleneck": {"peft_type": "BOTTLENECK", "bottleneck_size": 5},
    "ia3": {"peft_type": "IA3"},
    "pruned": {"peft_type": "DIFF_PRUNING", "l0_weight": 0.01},
    "vera": {"peft_type": "VERA", "r": 8},
    "loha": {"peft_type": "LOHA", "r": 3},
}  # fmt: skip


def run(engine: Engine, one: Case) -> tuple[list[float], list[float], dict[str, Tensor], Any]:
    """Losses, norms, adapter and evaluation of a task's steps."""
    engine.register_tasks([one.task])
    results = [engine.step()["one"] for _ in range(4)]
    evaluated = engine.evaluate("one", one.records)
    found = adapter(engine, "one")
    engine.close()
    return [r.loss for r in results], [r.grad_norm for r in results], found, evaluated


def whole(whole_backbone: Path, dtype: torch.dtype) -> Engine:
    return Engine(Backbone.load(whole_backbone, ALONE, dtype), ALONE)


@pytest.mark.parametrize(
    ("kind", "cuts"), [("lora", (1, 0)), ("prefix", (1, 1)), ("bottleneck", (2, 1)), ("ia3", (1, 1)),
                       ("pruned", (1, 1)), ("vera", (1, 0)), ("loha", (1, 1))]
)  # fmt: skip
def test_trains_as_the_whole_backbone(whole_backbone: Path, kind: str, cuts: tuple[int, int]) -> None:
    one = case(KINDS[kind])
    losses, norms, tensors, evaluated = run(whole(whole_backbone, torch.float64), one)
    server = FakeServer(whole_backbone)
    engine = split_engine(server, one.spec, cuts)
    found_losses, found_norms, found, found_evaluated = run(engine, one)
    assert found_losses == pytest.approx(losses, rel=1e-7)  # likelihoods are reported in fp32
    assert found_norms == pytest.approx(norms, rel=1e-10)
    assert found_evaluated.loss == pytest.approx(evaluated.loss, rel=1e-7)
    assert_close(found, tensors, 1e-10, kind)
    assert server.step == 4


@pytest.mark.parametrize(
    ("name", "cuts"), [("gpt2", (2, 1)), ("gemma3_text", (1, 0)), ("llama-tied", (1, 1))]
)
def test_families_and_fp32(tmp_path: Path, name: str, cuts: tuple[int, int]) -> None:
    path = tiny_models.make(tmp_path, name)
    one = case({"peft_type": "LORA", "r": 4, "target_modules": "all-linear"})
    losses, _, tensors, _ = run(whole(path, torch.float32), one)
    engine = split_engine(FakeServer(path, torch.float32), one.spec, cuts, "f32")
    found_losses, _, found, _ = run(engine, one)
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert_close(found, tensors, 2e-3, name)


def test_only_the_clients_layers_are_read(tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path, "llama-tied", num_hidden_layers=6)
    front, back = load_ends(read_backbone_info(path), ALONE, 1, 2)
    layers = [len(stage.model.decoder.layers) for stage in (front, back)]
    embedding = front.model.get_parameter("embedding.word_embeddings.weight")
    assert layers == [1, 2] and back.model.get_parameter("output_layer.weight") is embedding
