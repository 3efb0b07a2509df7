"""What is saved is what peft loads; what peft saves is what a task starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from torch import Tensor, nn

from megatron_mux import checkpoint
from megatron_mux.adapters.peft_format import read_adapter
from megatron_mux.checkpoint import SavedTask, TaskToSave
from megatron_mux.engine import Engine, Task
from megatron_mux.fusion.plan import plan_for
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.start import with_stored_config
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.families import FAMILIES, bottleneck, diff_pruning, ia3, loha, lora, prefix, vera
from tests.end_to_end.harness import Case, adapter, assert_close, assert_same, engine_logits, random_records
from tests.reference import peft_solo

pytestmark = pytest.mark.versions

WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
LOGITS = 5e-4  # largest absolute difference


def sections(family: str) -> dict[str, dict[str, Any]]:
    """What peft knows too."""
    if family == "deepseek_v3":
        shared = ["shared_experts.down_proj.weight", "shared_experts.gate_proj.weight"]
        return {
            "attention": lora(["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"], r=4, lora_alpha=30),
            "experts": lora(["kv_b_proj"], r=3, lora_alpha=30, target_parameters=["gate_up_proj", *shared]),
        }
    if family in WITH_EXPERTS:
        both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return {
            "attention": lora(["q_proj", "o_proj"], r=4),
            "experts": lora(["v_proj"], r=3, lora_alpha=30, target_parameters=both),
            "down": lora(["k_proj"], r=2, lora_alpha=30, target_parameters=["down_proj"]),
        }
    targets = FAMILIES[family]
    of_linear = (
        {} if targets.transposed else {"loha": loha("all-linear", r=3, rank_pattern={targets.mixed[0]: 2})}
    )
    return {
        **of_linear,
        "lora": lora(targets.query_value, r=4),
        "lora-everywhere": lora("all-linear", r=3, use_rslora=True, lora_alpha=5),
        "ia3": ia3(targets),
        "prefix": prefix(6),
        "vera": vera("all-linear", r=6),
        "vera-drawn": vera(targets.mixed, save_projection=False, projection_prng_key=9),
    }


def make_case(name: str, section: dict[str, Any], initial: dict[str, Tensor] | None = None) -> Case:
    training = {"per_device_train_batch_size": 2, "learning_rate": 0.02, "max_steps": 3, "seed": 4}
    return Case(name, section, training, random_records(7, 96, 3, 22, seed=8), initial)


def save(engine: Engine, case: Case, directory: Path) -> Path:
    """A task's checkpoint as a run writes it."""
    snapshot = engine.snapshot(case.name)
    entry = SavedTask(case.name, engine.progress(case.name)[0], "running", "", "", case.spec.plain(), data="")
    state = TaskToSave(entry, snapshot, engine.adapter_config(case.name))
    checkpoint.save(
        directory, [state], plan_for("spatial", {case.name: 1}, 1), engine.backbone.info.fingerprint
    )
    return directory / entry.checkpoint


def virtual_tokens(case: Case) -> int:
    """Places that a prefix takes."""
    return int(case.adapter.get("num_virtual_tokens", 0))


def assert_same_logits(engine: Engine, case: Case, model: nn.Module) -> None:
    """The engine's logits are the model's."""
    pairs = case.records.pairs[:4]
    ours = engine_logits(engine, case, pairs, virtual_tokens(case))
    for found, wanted in zip(ours, peft_solo.logits(model, pairs), strict=True):
        assert float((found - wanted).abs().max()) <= LOGITS


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_peft_loads_what_is_saved(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel, tmp_path: Path
) -> None:
    cases = [make_case(name, section) for name, section in sections(family).items()]
    engine = Engine(backbone_of(family), parallel)
    engine.register_tasks([case.task for case in cases])
    try:
        for _ in range(3):
            engine.step()
        for case in cases:
            directory = save(engine, case, tmp_path / case.name)
            bare = peft_solo.load_model(path_of(family))
            plain_logits = peft_solo.logits(bare, case.records.pairs[:1])[0]
            loaded = PeftModel.from_pretrained(bare, directory)
            loaded.eval()
            assert_same_logits(engine, case, loaded)
            moved = (peft_solo.logits(loaded, case.records.pairs[:1])[0] - plain_logits).abs().max()
            assert float(moved) > 10 * LOGITS, f"{case.name}: the adapter does too little to tell"
            config = json.loads((directory / "adapter_config.json").read_text())
            assert config["peft_type"] == case.adapter["peft_type"]
    finally:
        for case in cases:
            engine.remove_task(case.name)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", *WITH_EXPERTS])
def test_a_task_starts_from_what_peft_saved(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel, tmp_path: Path
) -> None:
    backbone = backbone_of(family)
    for name, section in sections(family).items():
        initial = peft_solo.random_adapter(path_of(family), section, seed=3)
        model = peft_solo.wrap(peft_solo.load_model(path_of(family)), section, initial)
        model.save_pretrained(tmp_path / name)  # type: ignore[operator]
        case = make_case(name, section)
        only_named = {"peft_type": section["peft_type"], "adapter_name_or_path": name}
        taken, problems = with_stored_config(only_named, tmp_path)
        assert not problems and taken["peft_type"] == section["peft_type"]
        read = read_adapter(tmp_path / name, case.spec.adapter, backbone.shape)
        engine = Engine(backbone, parallel)
        engine.register_tasks([Task(case.spec, case.records.as_dataset(), initial=read)])
        try:
            assert_same(adapter(engine, name), initial, name)
            assert_same_logits(engine, case, model)
        finally:
            engine.remove_task(name)


def test_own_kinds_come_back_as_they_were(
    backbone_of: BackboneOf, parallel: Parallel, tmp_path: Path
) -> None:
    backbone, targets = backbone_of("llama"), FAMILIES["llama"]
    own = {
        "bottleneck": bottleneck(targets.outputs, non_linearity="silu"),
        "diff": diff_pruning(targets.query_value),
    }
    for name, section in own.items():
        case = make_case(name, section)
        engine = Engine(backbone, parallel)
        engine.register_tasks([case.task])
        for _ in range(3):
            engine.step()
        before, logits = adapter(engine, name), engine_logits(engine, case, case.records.pairs[:3])
        directory = save(engine, case, tmp_path / name)
        engine.remove_task(name)
        assert (
            json.loads((directory / "adapter_config.json").read_text())["peft_type"] == section["peft_type"]
        )
        spec = TaskSpec.model_validate(
            {**case.spec.plain(), "adapter": {**section, "adapter_name_or_path": str(directory)}}
        )
        engine.register_tasks(
            [
                Task(
                    spec,
                    case.records.as_dataset(),
                    initial=read_adapter(directory, spec.adapter, backbone.shape),
                )
            ]
        )
        try:
            if name == "bottleneck":
                assert_same(adapter(engine, name), before, name)
            again = engine_logits(engine, case, case.records.pairs[:3])
            assert_close(dict(enumerate_keys(again)), dict(enumerate_keys(logits)), 1e-5, name)
        finally:
            engine.remove_task(name)


def enumerate_keys(tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
    """Tensors by their place."""
    return [(str(i), tensor) for i, tensor in enumerate(tensors)]
