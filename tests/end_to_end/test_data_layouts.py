"""Data as people have them: each layout gives the tokens and labels that TRL makes of it, and trains.

TRL's side is what its users write: `datasets` reads the files, and `SFTTrainer`, `DPOTrainer` or `KTOTrainer` prepares
them. Its labels of a first token do not count, since nothing predicts it. No prompt of a supervised text ends where its
tokens would merge with the completion's: there TRL, which tokenises both together, has other tokens.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Task
from megatron_mux.tasks import load_task_file
from megatron_mux.training.task_setup import open_tasks
from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.outcome import assert_same_file, metrics
from tests.end_to_end.test_loop import python
from tests.unit.data.tiny_tokenizers import build

MAX_LENGTH, SEED = 48, 7
# ChatML with the tools in a system turn, and the assistant's turns marked, as TRL needs it for `assistant_only_loss`.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (mood or '') }}{% endif %}"
)
WORDS = "hello world this is a test another of the yes no it".split()


def words(start: int, count: int) -> str:
    return " ".join(WORDS[(start * 7 + i * i) % len(WORDS)] for i in range(count))


PAIRS = [{"prompt": words(i, 3 + i % 4), "completion": " " + words(i + 3, 1 + i % 5)} for i in range(12)]
TEXTS = [{"text": words(i, 2 + i * 12)} for i in range(8)]
TOOL = {"type": "function", "function": {"name": "test", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "test", "arguments": {"a": "b"}}}


def ask(i: int) -> dict[str, str]:
    return {"role": "user", "content": words(i, 3)}


def answer(i: int) -> dict[str, str]:
    return {"role": "assistant", "content": words(i, 2)}


CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "test"}, ask(i), {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": words(i, 1)}, answer(i), ask(i + 1), answer(i + 2),
        ],
        "tools": json.dumps([TOOL]),
    }
    for i in range(4)
]  # fmt: skip
CHOICES = [{"chosen": [ask(i), answer(i)], "rejected": [ask(i), answer(i + 4)]} for i in range(4)]
LABELS = [{**pair, "label": i % 3 == 0} for i, pair in enumerate(PAIRS)]
CONVERSATIONS = [{"prompt": [ask(i)], "completion": [answer(i + 1)]} for i in range(5)]


def _json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write(root: Path) -> None:
    """All layouts."""
    from datasets import Dataset, DatasetDict

    pairs, texts = Dataset.from_list(PAIRS), Dataset.from_list(TEXTS)
    pairs.to_parquet(root / "pairs.parquet")
    pairs.save_to_disk(root / "saved")
    texts.to_csv(root / "texts.csv", index=False)
    (root / "pairs.json").write_text(json.dumps(PAIRS, indent=2))
    _json_lines(root / "shards" / "a.jsonl", TEXTS[:3])
    texts.select(range(3, 8)).to_parquet(root / "shards" / "b.parquet")
    DatasetDict(train=texts, validation=pairs).save_to_disk(root / "splits")
    Dataset.from_list(CHATS).to_parquet(root / "chats.parquet")
    Dataset.from_list(CHOICES).to_parquet(root / "choices.parquet")
    Dataset.from_list(LABELS).to_csv(root / "labels.csv", index=False)
    _json_lines(root / "conversations.jsonl", CONVERSATIONS)
    _json_lines(root / "hub" / "data" / "train.jsonl", PAIRS)
    _json_lines(root / "hub" / "data" / "test.jsonl", PAIRS[:2])
    questions = [{"question": p["prompt"], "answer": p["completion"], "text": "an id"} for p in PAIRS]
    _json_lines(root / "questions.jsonl", questions)


# The data section of each layout.
LAYOUTS: dict[str, dict[str, Any]] = {
    "parquet": {"path": "pairs.parquet"},
    "arrow-directory": {"path": "saved"},
    "csv": {"path": "texts.csv"},
    "json-array": {"path": "pairs.json"},
    "files": {"path": ["shards/*.jsonl", "shards/b.parquet"]},
    "splits": {"path": "splits", "split": "validation"},
    "hub": {"path": "hub", "split": "train[25%:]"},
    "tools": {"path": "chats.parquet", "max_length": 300},
    "conversations": {"path": "conversations.jsonl", "chat_template_kwargs": {"mood": "yes"}},
    "mixture": {
        "mixture": [
            {"path": "texts.csv", "weight": 0.7},
            {"path": "splits", "split": "train", "weight": 0.3},
        ],
        "stopping_strategy": "all_exhausted",
    },
    "columns": {"path": "questions.jsonl", "columns": {"prompt": "question", "completion": "answer"}},
    "templates": {"path": "questions.jsonl", "templates": {"text": "test: {question}{answer}"}},
    "left": {"path": "texts.csv", "truncation_side": "left"},
    "preference-pairs": {"path": "choices.parquet"},
    "preference-labels": {"path": "labels.csv"},
}
LOSSES = {"preference-pairs": "dpo", "preference-labels": "kto"}


def read_by_datasets(root: Path, name: str) -> Any:
    """What a user of TRL writes for a layout."""
    import datasets as ds

    def file(kind: str, path: str) -> Any:
        return ds.load_dataset(kind, data_files=str(root / path))["train"]

    if name in ("parquet", "arrow-directory", "csv", "left", "json-array", "tools", *LOSSES):
        path = LAYOUTS[name]["path"]
        kind = {"saved": "", "pairs.json": "json", "texts.csv": "csv", "labels.csv": "csv"}.get(
            path, "parquet"
        )
        return file(kind, path) if kind else ds.load_from_disk(str(root / path))
    if name == "files":
        return ds.Dataset.from_list([*file("json", "shards/a.jsonl"), *file("parquet", "shards/b.parquet")])
    if name == "splits":
        return ds.load_from_disk(str(root / "splits"))["validation"]
    if name == "hub":
        return ds.load_dataset(str(root / "hub"), split="train[25%:]")
    if name == "conversations":
        return file("json", "conversations.jsonl").map(lambda row: {"chat_template_kwargs": {"mood": "yes"}})
    if name == "mixture":
        parts = [ds.Dataset.from_list([*file("csv", "texts.csv")]), ds.Dataset.from_list(TEXTS)]
        return ds.interleave_datasets(parts, [0.7, 0.3], SEED, stopping_strategy="all_exhausted")
    rows = file("json", "questions.jsonl")
    if name == "columns":
        return rows.remove_columns("text").rename_columns({"question": "prompt", "answer": "completion"})
    assert name == "templates"
    return rows.map(
        lambda row: {"text": f"test: {row['question']}{row['answer']}"}, remove_columns=["question", "answer"]
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, the files of all layouts, and a task file with a task for each."""
    import torch
    from datasets.utils.logging import disable_progress_bar
    from transformers import LlamaConfig, LlamaForCausalLM

    disable_progress_bar()
    root = tmp_path_factory.mktemp("layouts")
    tokenizer = build(TEMPLATE, pad_token="</s>")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 56}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **shape)
    LlamaForCausalLM(config).save_pretrained(root / "backbone")
    tokenizer.save_pretrained(root / "backbone")
    _write(root)
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}
    training = {"per_device_train_batch_size": 3, "max_steps": 2, "seed": SEED}
    tasks = [
        {
            "name": name,
            "adapter": adapter,
            "training": {**training, **({"loss": LOSSES[name]} if name in LOSSES else {})},
            "data": {"max_length": MAX_LENGTH, **data, "shuffle": False},
        }
        for name, data in LAYOUTS.items()
    ]
    (root / "tasks.yaml").write_text(json.dumps({"tasks": tasks}))
    return root


def prepared_by_trl(place: Path, name: str) -> list[dict[str, list[int]]]:
    """What TRL's trainer makes of the layout. Its preparation alone is called, which needs no model."""
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    if name in LOSSES:
        return _preferences_by_trl(place, name)
    data = LAYOUTS[name]
    config = SFTConfig(
        max_length=data.get("max_length", MAX_LENGTH),
        truncation_mode="keep_end" if data.get("truncation_side") == "left" else "keep_start",
        assistant_only_loss=name == "tools",
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    tokenizer = load_tokenizer(place / "backbone")
    rows = read_by_datasets(place, name)
    trainer: Any = object.__new__(SFTTrainer)
    completions = "prompt" in rows.column_names  # the default
    vars(trainer).update(_tokenizer=tokenizer, chat_template=None, completion_only_loss=completions)
    return list(trainer._prepare_dataset(rows, tokenizer, config, False, None, "train"))


def _preferences_by_trl(place: Path, name: str) -> list[dict[str, list[int]]]:
    """The sequences that the trainer of a preference makes, cut as its collator does."""
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer

    classes: Any = (DPOTrainer, DPOConfig) if LOSSES[name] == "dpo" else (KTOTrainer, KTOConfig)
    kind, config_of = classes
    config = config_of(max_length=MAX_LENGTH, bf16=False, use_cpu=True, report_to="none")
    tokenizer = load_tokenizer(place / "backbone")
    trainer: Any = object.__new__(kind)
    vars(trainer).update(_tokenizer=tokenizer, calculate_KL=False, desirable_weight=1, undesirable_weight=1)
    found: list[dict[str, list[int]]] = []
    for row in trainer._prepare_dataset(read_by_datasets(place, name), tokenizer, config, "train"):
        prompt = row["prompt_ids"]
        for key in ("chosen_ids", "rejected_ids", "completion_ids"):
            if key in row:
                labels = [-100] * len(prompt) + row[key]
                found.append({"input_ids": (prompt + row[key])[:MAX_LENGTH], "labels": labels[:MAX_LENGTH]})
    return found


def test_layouts_give_the_tokens_of_trl(place: Path, tmp_path: Path) -> None:
    said: list[str] = []
    files = DataFiles(load_tokenizer(place / "backbone"), said.append, tmp_path)
    specs = load_task_file(place / "tasks.yaml")
    tasks: list[Task] = open_tasks(specs, read_backbone_info(place / "backbone"), files, said.append)
    for task in tasks:
        theirs = prepared_by_trl(place, task.spec.name)
        assert len(task.data) == len(theirs) > 3, task.spec.name
        for i, their in enumerate(theirs):
            example = task.data[i]
            ids = example.tokens.tolist()
            labels = [token if on else -100 for token, on in zip(ids, example.labelled, strict=True)]
            assert (ids, labels[1:]) == (their["input_ids"], their["labels"][1:]), (task.spec.name, i)
        if task.spec.name == "preference-labels":
            labels_of: Any = task.data
            assert labels_of.desirable.tolist() == [row["label"] for row in LABELS]
    whole = [len(files.tokenizer(row["text"])["input_ids"]) + 1 for row in TEXTS]
    longer, lost = (
        sum(count > MAX_LENGTH for count in whole),
        sum(max(0, count - MAX_LENGTH) for count in whole),
    )
    assert 2 < longer < len(TEXTS) - 2
    for name in ("csv", "left"):
        # The first token of a record is none to learn, be it cut off or left.
        told = f"{longer} of 8 records are longer than 48 tokens; cutting them loses {lost} of {sum(whole) - 8} tokens"
        assert any(line.startswith(f"{name}: {place / 'texts.csv'}: {told}") for line in said)


def _run(server: Server, place: Path, tasks: Path, *more: str) -> subprocess.CompletedProcess[str]:
    flags = ["--backbone", str(place / "backbone"), "--mux-tasks", str(tasks), "--mux-no-progress", *more]
    return python(server, "pretrain_mux.py", *flags)


def test_all_layouts_train_and_bad_files_are_told(place: Path, tmp_path: Path, server: Server) -> None:
    from datasets import Dataset

    run = _run(server, place, place / "tasks.yaml", "--save", str(tmp_path / "run"))
    assert run.returncode == 0, run.stderr
    for name in LAYOUTS:
        metrics = (tmp_path / "run" / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in metrics] == [1, 2]
    bad: dict[str, tuple[str | list[dict[str, str]], str]] = {
        "lines.jsonl": ('{"text": "a"}\n{"text": 3}\n', 'line 2: "text" must be text, got a JSON number'),
        "array.json": ('[{"text": "a"}, {"txt": "b"}]', "row 2: no known form"),
        "table.csv": ("text,id\na,1\n\nb\n", "row 2 (line 4): has 1 values, but the header names 2 columns"),
        "rows.parquet": ("PAR1", "cannot be read: "),
        "nulls.parquet": (PAIRS, 'row 3: "completion" must be text, got a JSON null'),
    }
    task = json.loads((place / "tasks.yaml").read_text())["tasks"][0]
    tasks = []
    for name, (content, _) in bad.items():
        if isinstance(content, str):
            (tmp_path / name).write_text(content)
        else:
            rows = [
                {**row, "completion": None if i == 2 else row["completion"]} for i, row in enumerate(content)
            ]
            Dataset.from_list(rows).to_parquet(tmp_path / name)
        tasks.append({**task, "name": name, "data": {"path": str(tmp_path / name)}})
    (tmp_path / "bad.yaml").write_text(json.dumps({"tasks": tasks}))
    run = _run(server, place, tmp_path / "bad.yaml")
    assert run.returncode == 2 and "Traceback" not in run.stderr
    for name, (_, said) in bad.items():
        assert f"{tmp_path / name}: {said}" in run.stderr


def test_a_killed_run_of_all_layouts_continues_exactly(place: Path, tmp_path: Path, server: Server) -> None:
    """In an order that is drawn, over more than an epoch of the smallest data set."""
    content = json.loads((place / "tasks.yaml").read_text())
    for task in content["tasks"]:
        task["data"]["shuffle"], task["training"]["max_steps"] = True, 4
    tasks = place / "shuffled.yaml"
    tasks.write_text(json.dumps(content))
    flags = ["--backbone", str(place / "backbone"), "--mux-tasks", str(tasks), "--mux-no-progress"]
    flags += ["--save-interval", "1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert server.run([*flags, "--save", str(whole)]).status == 0
    fault = Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 2 * len(LAYOUTS) + 1, "kill before")
    assert server.run([*flags, "--save", str(killed)], fault=fault).status == -signal.SIGKILL
    run = server.run([*flags, "--save", str(killed), "--load", str(killed)])
    assert run.status == 0, run.errors
    for name in LAYOUTS:
        assert metrics(killed, name) == metrics(whole, name), name
        ours, theirs = (directory / name / "checkpoint-4" for directory in (killed, whole))
        for file in theirs.iterdir():
            assert_same_file(ours / file.name, file)
