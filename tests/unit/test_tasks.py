"""What `tasks.yaml` may say, and what follows from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_mux.adapters.lora import LoraSpec
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec, TrainingSpec, load_task_file
from tests.unit.task_files import load, problems_of, task, with_data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_data(tmp_path)


def test_importing_tasks_is_cheap() -> None:
    heavy = ("transformers", "peft", "megatron", "megatron.core")
    code = f"import sys, megatron_mux.tasks; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_example_of_the_design(folder: Path) -> None:
    text = """
tasks:
  - name: movie-sentiment
    adapter:
      peft_type: LORA
      r: 8
      lora_alpha: 16
      lora_dropout: 0.0
      target_modules: [q_proj, v_proj]
    data: {path: data/a.jsonl, max_length: 64, shuffle: true}
    training:
      per_device_train_batch_size: 8
      gradient_accumulation_steps: 2
      learning_rate: 1.0e-3
      lr_scheduler_type: cosine
      warmup_steps: 5
      weight_decay: 0.0
      max_grad_norm: 1.0
      optim: adamw_torch
      max_steps: 40
      seed: 0
    eval: {path: data/b.jsonl, eval_steps: 20}
  - name: second
    adapter: {peft_type: PREFIX_TUNING, num_virtual_tokens: 4}
    data: {path: data/b.jsonl}
"""
    (folder / "tasks.yaml").write_text(text)
    first, second = load_task_file(folder / "tasks.yaml")
    assert first.data.path == folder / "data" / "a.jsonl"
    assert first.sequences_per_step == 16
    assert (first.total_steps(7), first.training.warmup(40)) == (40, 5)
    assert isinstance(first.adapter, LoraSpec)
    assert (first.adapter.lora_alpha, type(first.adapter.lora_alpha)) == (16, int)
    assert first.eval is not None and first.eval.eval_steps == 20
    assert second.training == TrainingSpec()
    assert (second.training.learning_rate, second.training.num_train_epochs) == (5e-5, 3.0)


def test_missing_data_may_be_left_to_whoever_opens_it(folder: Path) -> None:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": [task(data__path="gone.jsonl")]}))
    (spec,) = load_task_file(path, data_later=True)
    assert spec.data.path == folder / "gone.jsonl"
    path.write_text(yaml.safe_dump({"tasks": [task(data__path="gone.jsonl", adapter__r=0)]}))
    with pytest.raises(UserError) as caught:
        load_task_file(path, data_later=True)
    assert len(caught.value.problems) == 2


def test_one_task_by_itself(folder: Path) -> None:
    (folder / "one.yaml").write_text(yaml.safe_dump(task()))
    assert [t.name for t in load_task_file(folder / "one.yaml")] == ["movie"]
    (folder / "one.yaml").write_text(yaml.safe_dump(task(training__max_steps="x")))
    with pytest.raises(
        UserError, match=r"one.yaml: task 'movie': training.max_steps: must be a whole number"
    ):
        load_task_file(folder / "one.yaml")


@pytest.mark.parametrize(
    "adapter",
    [
        {
            "use_dora": False,
            "modules_to_save": None,
            "rank_pattern": {},
            "bias": "none",
            "init_lora_weights": True,
        },
        {"task_type": "CAUSAL_LM", "inference_mode": True, "peft_version": "0.1", "fan_in_fan_out": True},
        {"lora_alpha": "1e1"},
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers\.[01]\.self_attn\.q_proj"},
        {"target_modules": None},
    ],
)
def test_what_asks_for_nothing_is_taken(folder: Path, adapter: dict[str, Any]) -> None:
    (spec,) = load(folder, task(adapter={"peft_type": "LORA", **adapter}))
    assert spec.adapter.peft_type == "LORA"


# -- starting from an existing adapter


def stored(folder: Path, weights: bool = True, **config: Any) -> None:
    (folder / "adapter").mkdir()
    full = {
        "peft_type": "LORA",
        "r": 16,
        "lora_alpha": 4,
        "target_modules": ["v_proj", "q_proj"],
        "bias": "none",
    }
    full |= {
        "use_dora": False,
        "inference_mode": True,
        "init_lora_weights": "gaussian",
        "new_in_peft_2": None,
    }
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(full | config))
    if weights:
        (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")


def from_stored(**adapter: Any) -> dict[str, Any]:
    return task(adapter={"peft_type": "LORA", "adapter_name_or_path": "adapter", **adapter})


def test_an_adapter_to_start_from_brings_its_config(folder: Path) -> None:
    stored(folder, lora_dropout=0.5)
    (spec,) = load(folder, from_stored(lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    assert isinstance(spec.adapter, LoraSpec)
    assert (spec.adapter.r, spec.adapter.lora_alpha, spec.adapter.lora_dropout) == (16, 4, 0.1)
    assert spec.adapter.adapter_name_or_path == folder / "adapter"


@pytest.mark.parametrize(
    ("config", "adapter", "said"),
    [
        ({}, {"r": 8}, "adapter.r: is 8 here but 16 in "),
        ({}, {"target_modules": ["q_proj"]}, "adapter.target_modules: is ['q_proj'] here but "),
        ({}, {"peft_type": "IA3"}, "adapter.peft_type: is 'IA3' here but 'LORA' in "),
        ({"use_qalora": True}, {}, "has use_qalora true, which is not supported yet"),
        ({"init_lora_weights": "eva"}, {}, "adapter.init_lora_weights: 'eva' is not supported"),
        ({"use_dora": True}, {"use_dora": False}, "adapter.use_dora: is false here but true in "),
        ({"new_in_peft_2": 3}, {}, "has new_in_peft_2 3, which is not supported yet"),
        ({"peft_type": "NONE_OF_OURS"}, {}, "has peft_type 'NONE_OF_OURS', which is not supported"),
        ({"weights": False}, {}, "holds no adapter_model.safetensors"),
        (
            {},
            {"adapter_name_or_path": "nowhere"},
            "nowhere: no such directory: give that of an adapter, a task or a run",
        ),
        ({}, {"adapter_name_or_path": "data"}, "holds no adapter_config.json"),
        ({}, {"adapter_name_or_path": 3}, "adapter.adapter_name_or_path: must be a path, got 3"),
    ],
)
def test_adapters_that_cannot_be_started_from(
    folder: Path, config: dict[str, Any], adapter: dict[str, Any], said: str
) -> None:
    stored(folder, **config)
    assert any(said in problem for problem in problems_of(folder, from_stored(**adapter)))


def test_the_newest_checkpoint_of_a_task_can_be_started_from(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    for step in (4, 12):
        checkpoint = folder / "run" / "a" / f"checkpoint-{step}"
        peft.LoraConfig(r=step, target_modules=["q_proj"]).save_pretrained(str(checkpoint))
        (checkpoint / "adapter_model.safetensors").write_bytes(b"")
    (spec,) = load(folder, task(adapter={"peft_type": "LORA", "adapter_name_or_path": "run/a"}))
    assert spec.adapter.adapter_name_or_path == folder / "run" / "a" / "checkpoint-12"
    assert spec.plain()["adapter"]["r"] == 12


def test_every_method_of_peft_brings_its_own_config(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    configs = {
        "lora": peft.LoraConfig(r=4, target_modules=["q_proj"], use_rslora=True),
        "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "prefix": peft.PrefixTuningConfig(
            num_virtual_tokens=5, token_dim=8, num_layers=2, num_attention_heads=2, encoder_hidden_size=8
        ),
    }
    for name, config in configs.items():
        config.save_pretrained(str(folder / name))
        (folder / name / "adapter_model.safetensors").write_bytes(b"")
        kind = config.peft_type.value
        (spec,) = load(folder, task(adapter={"peft_type": kind, "adapter_name_or_path": name}))
        assert spec.adapter.peft_type == kind


# -- what follows from a task


@pytest.mark.parametrize(
    ("epochs", "batch", "accumulation", "records", "steps"),
    [
        (1, 4, 1, 8, 2),
        (1, 4, 1, 9, 3),
        (3, 4, 2, 9, 6),
        (0.5, 4, 1, 10, 2),
        (0.1, 1, 1, 3, 1),
        (2.5, 8, 1, 1, 3),
    ],
)
def test_steps_are_counted_as_transformers_does(
    epochs: float, batch: int, accumulation: int, records: int, steps: int
) -> None:
    training = {
        "num_train_epochs": epochs,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
    }
    assert TaskSpec.model_validate(task(training=training)).total_steps(records) == steps


def test_warmup_as_a_share() -> None:
    assert TrainingSpec.model_validate({"warmup_ratio": 0.1}).warmup(25) == 3
    assert TrainingSpec.model_validate({"warmup_steps": 0.1}).warmup(25) == 3
    assert TrainingSpec.model_validate({"warmup_steps": 7}).warmup(25) == 7
    assert TrainingSpec.model_validate({"max_steps": -1}).num_train_epochs == 3


def test_fingerprint_tells_what_decides_the_updates() -> None:
    spec = TaskSpec.model_validate(task())
    same = TaskSpec.model_validate(task(name="other", data__path="elsewhere.jsonl", eval={"path": "x"}))
    assert spec.differences(same) == []
    other = TaskSpec.model_validate(task(training__learning_rate=1, data__shuffle=False))
    assert other.differences(spec) == [
        "data.shuffle: False, not True",
        "training.learning_rate: 1.0, not 5e-05",
    ]
