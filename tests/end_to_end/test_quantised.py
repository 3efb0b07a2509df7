"""Tasks on quantised backbones come out as from `transformers`, `peft` and the library that quantised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, Planning
from megatron_mux.runtime import Parallel
from tests import quantised_models, tiny_models
from tests.end_to_end.harness import Case, assert_close, engine_logits, random_records, train
from tests.quantised_models import VOCABULARY
from tests.reference import peft_solo
from tests.reference.loop import Recipe, SoloResult
from tests.reference.loop import train as train_model

STEPS = 20
LOSS = 1e-4  # relative, every step
ADAPTER = 2e-3  # relative Frobenius norm of every tensor after the last step


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised_models.make_plain(tmp_path_factory.mktemp("quantised"))


def cases(path: Path) -> list[Case]:
    """Three tasks, no two alike."""
    recipes: list[dict[str, Any]] = [
        {
            "per_device_train_batch_size": 4,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 3,
        },
        {
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "linear",
            "weight_decay": 0.05,
            "max_grad_norm": 0.5,
        },
        {
            "per_device_train_batch_size": 3,
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "max_grad_norm": 0.0,
        },
    ]
    targets = ["q_proj", "v_proj"], "all-linear", ["gate_proj", "down_proj"]
    found = []
    for i, (recipe, target) in enumerate(zip(recipes, targets, strict=True)):
        adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": target, "use_dora": i == 2}
        records = random_records(9, VOCABULARY, 4, 12, seed=i)
        initial = peft_solo.random_adapter(path, adapter, seed=i)
        found.append(Case(f"task-{i}", adapter, {**recipe, "max_steps": STEPS}, records, initial))
    return found


def qlora(path: Path, case: Case, double: bool = True) -> SoloResult:
    """The task alone, with `transformers`, `peft` and bitsandbytes."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=quantised_models.bitsandbytes_config(double)
    )
    model.requires_grad_(False)
    wrapped = peft_solo.wrap(model, case.adapter, case.initial)
    wrapped.train()  # in eval(), bitsandbytes repacks weights on a CPU: facts of its version 0.50
    return train_model(
        wrapped,
        peft_solo.trainable(wrapped),
        case.steps(STEPS),
        Recipe.of(case.training),
        lambda: peft_solo.export(wrapped),
    )


def test_tasks_come_out_as_from_qlora(plain: Path, parallel: Parallel) -> None:
    backbone = Backbone.load(plain, parallel, quantise="nf4", recompute="full")
    tasks = cases(plain)
    found = train(backbone, parallel, tasks, STEPS, planning=Planning("spatial", 1))
    for case in tasks:
        wanted = qlora(plain, case)
        assert found.losses(case.name) == pytest.approx(wanted.losses, rel=LOSS), case.name
        assert_close(found.tensors[case.name], wanted.tensors, ADAPTER, case.name)


FORMATS: dict[str, Callable[[Path], Path]] = {
    "nf4": partial(quantised_models.make_nf4, double=False),
    "nf4 with double quantisation": partial(quantised_models.make_nf4, double=True),
    "torchao int8": partial(quantised_models.make_torchao, method="int8"),
    "torchao fp8": partial(quantised_models.make_torchao, method="fp8"),
    "int8 by channel": partial(quantised_models.make_compressed_tensors, method="int8", strategy="channel"),
    "int8 by group": partial(quantised_models.make_compressed_tensors, method="int8", strategy="group"),
    "fp8 by tensor": partial(quantised_models.make_compressed_tensors, method="fp8", strategy="tensor"),
    "fp8 by block": partial(quantised_models.make_compressed_tensors, method="fp8", strategy="block"),
    "fp8 of DeepSeek-V3": quantised_models.make_blocks,
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_stored_backbone_has_the_logits_of_transformers(form: str, plain: Path, parallel: Parallel) -> None:
    path = FORMATS[form](plain)
    case = cases(plain)[0]
    pairs = case.records.pairs[:3]
    found = engine_logits(Engine(Backbone.load(path, parallel), parallel), case, pairs)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    for ours, theirs in zip(found, peft_solo.logits(model, pairs), strict=True):
        assert torch.allclose(ours, theirs.float(), rtol=0, atol=1e-4), (ours - theirs).abs().max()


def test_every_kind_trains_as_on_the_dequantised_weights(
    plain: Path, parallel: Parallel, tmp_path: Path
) -> None:
    """Also those that read weights: when they begin, and in each pass."""
    made = Backbone.load(plain, parallel, quantise="nf4")
    adapters: list[dict[str, Any]] = [
        {"peft_type": "DIFF_PRUNING", "sparsity": 0.9, "target_modules": ["v_proj"]},
        {"peft_type": "LORA", "r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
        {"peft_type": "LORA", "r": 4, "init_lora_weights": "pissa", "target_modules": ["o_proj"]},
        {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        {"peft_type": "BOTTLENECK", "bottleneck_size": 6, "target_modules": ["o_proj"]},
        {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5},
    ]
    training = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 3}
    tasks = [
        Case(f"task-{i}", adapter, training, random_records(4, VOCABULARY, 4, 9, seed=i))
        for i, adapter in enumerate(adapters)
    ]
    path = quantised_models.dequantised(plain, made, tmp_path)
    wanted, found = (
        train(backbone, parallel, tasks, 3, planning=Planning("spatial", 1))
        for backbone in (Backbone.load(path, parallel), made)
    )
    for case in tasks:
        assert found.losses(case.name) == pytest.approx(wanted.losses(case.name), rel=1e-6), case.name
        assert_close(found.tensors[case.name], wanted.tensors[case.name], 1e-5, case.name)


def test_quantised_experts_train_as_dequantised_ones(parallel: Parallel, tmp_path: Path) -> None:
    paths = quantised_models.make_experts(tiny_models.make(tmp_path, "qwen3_moe"))
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], **experts}
    training = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 2}
    case = Case("task", adapter, training, random_records(4, VOCABULARY, 4, 9, seed=0))
    backbones = [Backbone.load(path, parallel) for path in paths]
    held = backbones[0].offload.groups[0].dequantised
    assert held is not None and len(held.matrices) == 2, "experts are not held in 8 bits"
    found, wanted = (train(each, parallel, [case], 2, planning=Planning("spatial", 1)) for each in backbones)
    assert found.losses("task") == pytest.approx(wanted.losses("task"), rel=1e-6)
    assert_close(found.tensors["task"], wanted.tensors["task"], 1e-5, "task")
