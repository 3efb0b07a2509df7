"""What is said of a `tasks.yaml` that is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_mux.errors import UserError
from megatron_mux.tasks import load_task_file
from tests.unit.task_files import load, problems_of, task, with_data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_data(tmp_path)


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
        ({"training__optim": "adamw"}, "training.optim: adamw: transformers calls it adamw_torch_fused"),
        ({"training__optim": "lion_32"}, "did you mean 'lion_32bit'?"),
        ({"training__lr_scheduler_type": "greedy"}, "greedy is not supported, it depends on losses"),
        ({"training__lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs: 'power' is unknown: linear takes none"),
        ({"training__bf16": True}, "training.bf16: is of the whole run: give it --bf16"),
        ({"training__deepspeed": "x.json"}, "training.deepspeed: is a field of transformers"),
        ({"training__warmup_ratio": 0.1, "training__warmup_steps": 3}, "give warmup_steps or warmup_ratio, not both"),
        ({"training__lr_scheduler_type": "constant", "training__warmup_steps": 3}, "write constant_with_warmup"),
        ({"training__warmup_steps": 2.5}, "warmup_steps must be a whole number, or a share below 1"),
        ({"adapter__r": "8"}, "adapter.r: must be a whole number of at least 1 and at most 65536, got '8' (a text: "),
        ({"training__max_steps": "1e0"}, "got '1e0' (YAML reads that as text: write 1)"),
        ({"training__max_steps": "1e9"}, "(YAML reads that as text: write 1000000000)"),
        ({"adapter__r": 0}, "adapter.r: must be a whole number of at least 1 and at most 65536, got 0"),
        ({"adapter__lora_dropout": 1.0}, "must be a number of at least 0 and less than 1, got 1.0"),
        ({"adapter__target_modules": []}, "adapter.target_modules: must name at least one module"),
        ({"adapter__target_modules": [1]}, "adapter.target_modules: must be a list of module names"),
        ({"adapter__target_modules": "q_["}, "adapter.target_modules: 'q_[' is neither"),
        ({"adapter__modules_to_save": "lm_head"}, "adapter.modules_to_save: must be a list"),
        ({"adapter__trainable_token_indices": [3, 3]}, "adapter.trainable_token_indices: names token 3 twice"),
        ({"adapter__trainable_token_indices": ["a"]}, "must be a list of tokens such as [5, 32000], or"),
        ({"adapter__use_qalora": True}, "adapter.use_qalora: is a peft field that megatron-mux does not support yet"),
        ({"adapter__lora_bias": True}, "adapter.lora_bias: is a peft field that megatron-mux does not support yet"),
        ({"adapter__layers_to_transform": [3, -1]}, "adapter.layers_to_transform: must be the index of a layer from 0"),
        (
            {"adapter__layers_to_transform": 3, "adapter__target_modules": "all-linear"},
            "adapter: layers_to_transform needs a list of names in target_modules",
        ),
        ({"adapter__layers_pattern": "layers"}, "adapter: layers_pattern needs layers_to_transform"),
        ({"adapter__layers_pattern": 3}, "adapter.layers_pattern: must be the name of the list of layers"),
        ({"adapter__rank_pattern": {"q": 0}}, "adapter.rank_pattern: must map ends of modules' paths to ranks"),
        ({"adapter__rank_pattern": {"q_[": 1}}, "adapter.rank_pattern: 'q_[' is not a regular expression"),
        ({"adapter__alpha_pattern": {"q": True}}, "adapter.alpha_pattern: must map ends of modules' paths to numbers"),
        ({"adapter__exclude_modules": [1]}, "adapter.exclude_modules: must be a list of module names"),
        ({"adapter__bias": "all"}, "adapter.bias: only none is supported"),
        ({"adapter__init_lora_weights": "loftq"}, "adapter.init_lora_weights: 'loftq' is not supported: choose true"),
        ({"adapter__init_lora_weights": "pissa_niter_0"}, "adapter.init_lora_weights: 'pissa_niter_0' is not"),
        ({"adapter__init_lora_weights": 1}, "adapter.init_lora_weights: 1 is not supported: choose true"),
        ({"adapter__task_type": "SEQ_CLS"}, "adapter.task_type: only CAUSAL_LM is supported"),
        ({"adapter__bottleneck_size": 3}, "adapter.bottleneck_size: unknown key"),
        ({"adapter__peft_type": "ADALORA"}, "adapter.peft_type: ADALORA is a method of peft that"),
        ({"adapter__peft_type": "lora"}, "did you mean 'LORA'?"),
        ({"adapter__peft_type": "DORA"}, "DORA is LORA with use_dora: true"),
        ({"adapter__rank": 8}, "adapter.rank: unknown key; did you mean 'r'?"),
        ({"training__lr": 1e-3}, "training.lr: unknown key; did you mean 'learning_rate'?"),
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
        ({"data__path": "no*such"}, "data.path: no file matches "),
        ({"data__path": "x" * 5000}, "data.path: no such file: "),
        ({"data__stopping_strategy": "all_exhausted"}, "data: stopping_strategy is of a mixture: leave it out"),
        ({"data": 3}, "data: must be a mapping of name, split, columns, templates, chat_template_kwargs, path"),
        ({"eval": {"path": "data/a.jsonl", "eval_steps": 0}}, "eval.eval_steps: must be a whole number of at least 1"),
        ({"eval": {"path": "nowhere"}}, "eval.path: no such file: "),
        ({"eval": {"path": "data/b.jsonl", "metrics": ["bleu"]}}, "eval.metrics: must be one or a list of accuracy, "),
        ({"eval": {"path": "data/b.jsonl", "eval_strategy": "epoch"}}, "eval.eval_strategy: an eval section evaluates"),
        ({"training__save_strategy": False}, "must be one of no, steps, epoch, best, got false (YAML reads"),
        ({"training__packing": True}, "training.packing: sequences are laid end to end without padding anyway"),
        ({"training__dataset_text_field": "body"}, "training.dataset_text_field: write data.columns: {text: NAME}"),
        ({"training__assistant_only_loss": False}, "training.assistant_only_loss: of messages only the assistant's"),
        ({"training__loraplus_lr_embedding": 1e-5}, "training.loraplus_lr_embedding: LoRA on embeddings"),
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


@pytest.mark.parametrize(
    ("tracker", "package"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "tensorboard")]
)
def test_a_missing_package_of_a_tracker_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, package: str
) -> None:
    monkeypatch.setattr(
        "megatron_mux.trackers.registry.find_spec", lambda name: None if name == package else name
    )
    assert problems_of(folder, task(training__report_to=["csv", tracker])) == [
        f"training.report_to: {tracker} needs the package {package}: pip install {package}, or leave {tracker} out"
    ]


def test_a_missing_package_of_an_optimizer_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_mux.tasks.training.find_spec", lambda name: None)
    (problem,) = problems_of(folder, task(training__optim="adamw_8bit"))
    assert problem.startswith(
        "training.optim: adamw_8bit needs the package bitsandbytes: pip install bitsandbytes, or"
    )
    assert load(folder, task(training__optim="lion_32bit"))
