"""What `tasks.yaml` may say, and what is said of it when it may not."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_mux.adapters.lora import LoraSpec
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec, TrainingSpec, load_task_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "data" / name).write_text('{"text": "x"}\n')
    return tmp_path


def task(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "movie",
        "adapter": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]},
        "data": {"path": "data/a.jsonl", "max_length": 16},
        "training": {"max_steps": 3},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        if field:
            base.setdefault(section, {})
            base[section] = {**base[section], field: value}
        else:
            base[section] = value
    return base


def problems_of(folder: Path, *tasks: Any, text: str | None = None) -> list[str]:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": list(tasks)}) if text is None else text)
    with pytest.raises(UserError) as caught:
        load_task_file(path)
    return [p.removeprefix(f"{path}: ").removeprefix("task 'movie' (#1): ") for p in caught.value.problems]


def load(folder: Path, *tasks: Any) -> list[TaskSpec]:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": list(tasks)}))
    return load_task_file(path)


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
    ("changes", "said"),
    [
        ({"training__learning_rate": "fast"}, "training.learning_rate: must be a number greater than 0, got 'fast'"),
        ({"training__learning_rate": "8"}, "training.learning_rate: must be a number greater than 0, got '8'"),
        ({"training__learning_rate": True}, "training.learning_rate: must be a number greater than 0, got true"),
        ({"training__learning_rate": math.nan}, "training.learning_rate: must be a number greater than 0, got nan"),
        ({"training__learning_rate": 0}, "training.learning_rate: must be a number greater than 0, got 0"),
        ({"training__max_steps": 0}, "max_steps: must be a whole number of at least 1 and at most 1000000000, got 0"),
        ({"training__max_steps": 2.0}, "must be a whole number of at least 1 and at most 1000000000, got 2.0"),
        ({"training__num_train_epochs": 2}, "training: give max_steps or num_train_epochs, not both"),
        ({"training__seed": -1}, "training.seed: must be a whole number of at least 0"),
        ({"training__optim": "adamw"}, "did you mean 'adamw_torch'?"),
        ({"training__bf16": True}, "training.bf16: is of the whole run: use --bf16"),
        ({"training__label_smoothing_factor": 0.1}, "training.label_smoothing_factor: is a field of transformers"),
        ({"training__warmup_ratio": 0.1, "training__warmup_steps": 3}, "give warmup_steps or warmup_ratio, not both"),
        ({"training__lr_scheduler_type": "constant", "training__warmup_steps": 3}, "write constant_with_warmup"),
        ({"training__warmup_steps": 2.5}, "warmup_steps must be a whole number, or a share below 1"),
        ({"adapter__r": "8"}, "adapter.r: must be a whole number of at least 1 and at most 65536, got '8' (a text: "),
        ({"adapter__r": 0}, "adapter.r: must be a whole number of at least 1 and at most 65536, got 0"),
        ({"adapter__lora_dropout": 1.0}, "must be a number of at least 0 and less than 1, got 1.0"),
        ({"adapter__target_modules": []}, "adapter.target_modules: must name at least one module"),
        ({"adapter__target_modules": [1]}, "adapter.target_modules: must be a list of module names"),
        ({"adapter__target_modules": "q_["}, "adapter.target_modules: 'q_[' is neither"),
        ({"adapter__use_dora": True}, "adapter.use_dora: is a peft field that megatron-mux does not support yet"),
        ({"adapter__modules_to_save": ["lm_head"]}, "adapter.modules_to_save: is a peft field that"),
        ({"adapter__layers_to_transform": 3}, "adapter.layers_to_transform: is a peft field that"),
        ({"adapter__rank_pattern": {"q": 1}}, "adapter.rank_pattern: is a peft field that"),
        ({"adapter__bias": "all"}, "adapter.bias: only none is supported"),
        ({"adapter__init_lora_weights": "pissa"}, "adapter.init_lora_weights: only true"),
        ({"adapter__init_lora_weights": 1}, "adapter.init_lora_weights: only true"),
        ({"adapter__task_type": "SEQ_CLS"}, "adapter.task_type: only CAUSAL_LM is supported"),
        ({"adapter__bottleneck_size": 3}, "adapter.bottleneck_size: unknown key"),
        ({"adapter__peft_type": "ADALORA"}, "adapter.peft_type: ADALORA is a method of peft that"),
        ({"adapter__peft_type": "lora"}, "did you mean 'LORA'?"),
        ({"adapter__peft_type": {}}, "adapter.peft_type: must be one of LORA"),
        ({"adapter": None}, "adapter: must be a mapping of peft_type and the fields of that method, got nothing"),
        ({"adapter": {"r": 3}}, "adapter.peft_type: is missing"),
        ({"adapter": {"peft_type": "PREFIX_TUNING"}}, "adapter.num_virtual_tokens: is missing: it must be a whole"),
        (
            {"adapter": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3, "prefix_projection": True}},
            "adapter.prefix_projection: is a peft field that",
        ),
        (
            {"adapter": {"peft_type": "IA3", "target_modules": ["a"], "feedforward_modules": ["b"]}},
            "adapter: feedforward_modules must be among target_modules: b is not",
        ),
        ({"adapter": {"peft_type": "BOTTLENECK", "non_linearity": "swish"}}, "adapter.non_linearity: must be one of"),
        ({"adapter": {"peft_type": "DIFF_PRUNING", "sparsity": 1}}, "adapter.sparsity: must be a number"),
        ({"data__max_length": 1}, "max_length: must be a whole number of at least 2 and at most 1000000000, got 1"),
        ({"data__shufle": True}, "data.shufle: unknown key; did you mean 'shuffle'?"),
        ({"data__path": 3}, "data.path: must be a path, got 3"),
        ({"data__path": "nowhere.jsonl"}, "data.path: no such file: "),
        ({"data__path": "data"}, "data.path: is not a file: "),
        ({"data__path": "x" * 5000}, "data.path: no such file: "),
        ({"data": 3}, "data: must be a mapping of path, max_length, shuffle, got 3"),
        ({"eval": {"path": "data/a.jsonl", "eval_steps": 0}}, "eval.eval_steps: must be a whole number of at least 1"),
        ({"eval": {"path": "nowhere"}}, "eval.path: no such file: "),
        ({"traning": {}}, "traning: unknown key; did you mean 'training'?"),
        ({"training__max_lenght": 3}, "training.max_lenght: unknown key; did you mean 'data.max_length'?"),
    ],
)  # fmt: skip
def test_what_is_refused_and_how(folder: Path, changes: dict[str, Any], said: str) -> None:
    problems = problems_of(folder, task(**changes))
    assert len(problems) == 1
    assert said in problems[0]


BEYOND = [
    ("adapter__r", 65_536),
    ("adapter__bottleneck_size", 65_536),
    ("adapter__num_virtual_tokens", 65_536),
    ("data__max_length", 10**9),
    ("training__per_device_train_batch_size", 1_000_000),
    ("training__gradient_accumulation_steps", 1_000_000),
    ("training__max_steps", 10**9),
    ("training__num_train_epochs", 1_000_000),
    ("training__warmup_steps", 10**9),
    ("eval__eval_steps", 10**9),
    ("eval__per_device_eval_batch_size", 1_000_000),
]


@pytest.mark.parametrize(("field", "largest"), BEYOND)
def test_sizes_beyond_any_use(folder: Path, field: str, largest: int) -> None:
    base: dict[str, Any] = {"training": {}} if field == "training__num_train_epochs" else {}
    if field in ("adapter__bottleneck_size", "adapter__num_virtual_tokens"):
        base["adapter"] = {"peft_type": "BOTTLENECK" if "bottleneck" in field else "PREFIX_TUNING"}
    if field.startswith("eval__"):
        base["eval"] = {"path": "data/b.jsonl"}
    load(folder, with_field(base, field, largest))
    for value in (largest + 1, 10**30):
        (said,) = problems_of(folder, with_field(base, field, value))
        assert (
            said.startswith(field.replace("__", ".") + ": must be a ")
            and f"at most {largest}, got {value}" in said
        )


def with_field(base: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    section, _, key = field.partition("__")
    content = task(**base)
    return {**content, section: {**content.get(section, {}), key: value}}


@pytest.mark.parametrize(
    "field", ["adapter.r", "adapter.lora_alpha", "training.max_steps", "training.learning_rate"]
)
def test_a_number_too_long_to_write_out(folder: Path, field: str) -> None:
    section, _, key = field.partition(".")
    digits = f"0x1{'0' * 5000}"
    text = yaml.safe_dump({"tasks": [task(**{f"{section}__{key}": "THE NUMBER"})]}).replace(
        "THE NUMBER", digits
    )
    (said,) = problems_of(folder, text=text)
    assert said.startswith(f"{field}: must be a ") and said.endswith("got a number of thousands of digits")


def test_a_long_name_is_shown_by_its_beginning(folder: Path) -> None:
    (said,) = problems_of(folder, task(name="long-" * 2000))
    assert "(#1): name: must be made of" in said and "at most 100 characters" in said
    assert said.count("'long-long-") == 2 and len(said) < 600
    (spec,) = load(folder, task(name="x" * 100))
    assert spec.name == "x" * 100


@pytest.mark.parametrize(
    "name", ["", "a/b", "..", ".", "-a", "plan.json", "manifests", "é", "a b", "x" * 101, 3, None, False]
)
def test_names_that_cannot_be(folder: Path, name: Any) -> None:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": [task(name=name)]}))
    with pytest.raises(UserError, match="name: "):
        load_task_file(path)


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


def test_every_mistake_of_a_file_at_once(folder: Path) -> None:
    problems = problems_of(
        folder,
        task(name="a", training__learning_rate="fast", adapter__r=0),
        task(name="a"),
        17,
        task(name="b", data__path="gone"),
        task(name="c"),
    )
    assert [p.split(": ")[0] for p in problems] == [
        "task 'a' (#1)", "task 'a' (#1)", "task 'a' (#2)", "task (#3)", "task 'b' (#4)",
    ]  # fmt: skip
    assert problems[2] == "task 'a' (#2): name: is taken by task #1 already: every task needs its own"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("tasks:", "tasks: must be a list with at least one task, got nothing"),
        ("tasks: []", "tasks: must be a list with at least one task"),
        ("task: []", "unknown key 'task' at the top level; did you mean 'tasks'?"),
        ("- 1", "holds [1]: it must hold `tasks:`"),
        ("tasks:\n  - a: [", "line 2: not valid YAML: "),
        ("tasks:\n\t- 3", "line 2: not valid YAML: "),
        ("a: 1\x01", "not valid YAML: "),
        ("!!python/object:os.system {}", "line 1: not valid YAML: "),
        ("? [a]\n: 3", "line 1: not valid YAML: "),
        ("x: &a\n  b: *a\n", "unknown key 'x'"),
        ("[" * 5000, "not valid YAML: nested too deeply"),
        ("tasks: [{1: 2}]", "task (#1): unknown key 1"),
        ("tasks:\n- name: a\n  name: b\n", "line 3: name is given twice (first on line 2)"),
        ("tasks: 1\ntasks: 2\n", "line 2: tasks is given twice (first on line 1)"),
    ],
)
def test_broken_files(folder: Path, text: str, said: str) -> None:
    assert any(said in problem for problem in problems_of(folder, text=text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"tasks: \xe9")
    for path, said in (
        (tmp_path, "is a directory"),
        (tmp_path / "no", "no such file"),
        (tmp_path / "latin.yaml", "UTF-8"),
    ):
        with pytest.raises(UserError, match=said):
            load_task_file(path)


def test_a_duplicate_key_in_a_good_file_is_refused(folder: Path) -> None:
    text = yaml.safe_dump({"tasks": [task()]}) + "  eval: null\n  eval: null\n"
    assert ["is given twice" in p for p in problems_of(folder, text=text)] == [True]


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
        ({"use_dora": True}, {}, "has use_dora true, which is not supported yet"),
        ({"init_lora_weights": "pissa"}, {}, "has init_lora_weights 'pissa', which is not supported yet"),
        ({"new_in_peft_2": 3}, {}, "has new_in_peft_2 3, which is not supported yet"),
        ({"peft_type": "LOHA"}, {}, "has peft_type 'LOHA', which is not supported"),
        ({"weights": False}, {}, "holds no adapter_model.safetensors"),
        ({}, {"adapter_name_or_path": "nowhere"}, "adapter.adapter_name_or_path: no such directory"),
        ({}, {"adapter_name_or_path": "data"}, "holds no adapter_config.json"),
        ({}, {"adapter_name_or_path": 3}, "adapter.adapter_name_or_path: must be a path, got 3"),
    ],
)
def test_adapters_that_cannot_be_started_from(
    folder: Path, config: dict[str, Any], adapter: dict[str, Any], said: str
) -> None:
    stored(folder, **config)
    assert any(said in problem for problem in problems_of(folder, from_stored(**adapter)))


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
    assert not spec.differences(same)
    assert spec.differences(same) == []
    other = TaskSpec.model_validate(task(training__learning_rate=1, data__shuffle=False))
    assert spec.differences(other)
    assert other.differences(spec) == [
        "data.shuffle: False, not True",
        "training.learning_rate: 1.0, not 5e-05",
    ]
