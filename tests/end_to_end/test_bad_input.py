"""Whatever is wrong with tasks, flags and files: one line for each mistake, exit status 2, before a weight is read.

How each is worded is held by `tests/unit/test_tasks_refused.py`, `test_arguments.py` and those of data and targets.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.end_to_end.complaints import complaints
from tests.end_to_end.forked import Server
from tests.end_to_end.workplace import TASKS, Workplace, write_tokenizer

GOOD = {"prompt": "w1 w2", "completion": "w3"}
# Data files by name, each with something wrong in it.
FILES: dict[str, list[str | dict[str, Any]]] = {
    "broken.jsonl": [GOOD, '{"prompt": "w1', GOOD],
    "list.jsonl": [GOOD, "[1, 2]"],
    "shape.jsonl": [GOOD, {"question": "w1"}],
    "number.jsonl": [{"text": 5}],
    "empty.jsonl": [],
    "cut.jsonl": [{"prompt": "w1 " * 40, "completion": "w2"}],
}


Mistakes = Mapping[str, tuple[tuple[str, str, Any], list[str]]]
# Of each task, by its name: what is changed in it, and words of the one line that it leads to.
WHEN_READ: Mistakes = {
    "unknown-key": (("training", "lr", 1e-3), ["lr"]),
    "of-peft": (("adapter", "lora_bias", True), ["lora_bias"]),
    "wrong-type": (("adapter", "r", "eight"), ["r", "eight"]),
    "wrong-range": (("adapter", "lora_dropout", 1.5), ["lora_dropout", "1.5"]),
    "unknown-kind": (("adapter", "peft_type", "OFT"), ["OFT"]),
    "unknown-schedule": (("training", "lr_scheduler_type", "cosin"), ["cosin"]),
}
OF_PATHS: Mistakes = {
    "missing-data": (("data", "path", "gone.jsonl"), ["gone.jsonl"]),
    "missing-evaluation": (("eval", "path", "gone.jsonl"), ["gone.jsonl"]),
    "no-adapter": (("adapter", "adapter_name_or_path", "nowhere"), ["nowhere"]),
}
WITH_THE_BACKBONE: Mistakes = {
    "unknown-module": (("adapter", "target_modules", ["q_prj"]), ["q_prj", "q_proj"]),
    "other-family": (("adapter", "target_modules", ["c_attn"]), ["c_attn"]),
    "directory": (("data", "path", "backbone"), ["backbone"]),
    "broken-line": (("data", "path", "broken.jsonl"), ["broken.jsonl", "2"]),
    "no-object": (("data", "path", "list.jsonl"), ["list.jsonl", "2"]),
    "no-known-form": (("data", "path", "shape.jsonl"), ["shape.jsonl", "2"]),
    "number-for-text": (("data", "path", "number.jsonl"), ["number.jsonl", "1"]),
    "empty-file": (("data", "path", "empty.jsonl"), ["empty.jsonl"]),
    "nothing-to-learn": (("data", "path", "cut.jsonl"), ["cut.jsonl", "24"]),
    "not-utf-8": (("data", "path", "latin.jsonl"), ["latin.jsonl", "1"]),
    "lora-plus": (("training", "loraplus_lr_ratio", 16.0), ["loraplus_lr_ratio", "lora_B"]),
}
WHEN_TRACKED: Mistakes = {
    "trackers": (("training", "logging_dir", "tasks.yaml/logs"), ["logging_dir", "logs/trackers"]),
}


def mistaken(mistakes: Mistakes) -> dict[str, dict[str, Any]]:
    """A task with each of the mistakes, and a good one."""
    tasks = {"good": TASKS["lora"]}
    for name, ((section, key, value), _) in mistakes.items():
        task = copy.deepcopy(TASKS["prefix" if name == "lora-plus" else "lora"])
        task[section][key] = value
        if name == "trackers":
            task["training"]["report_to"] = ["csv"]
        tasks[name] = task
    return tasks


@pytest.mark.parametrize(
    "mistakes",
    [WHEN_READ, OF_PATHS, WITH_THE_BACKBONE, WHEN_TRACKED],
    ids=["when read", "of paths", "with the backbone", "when tracked"],
)
def test_a_mistake_in_the_tasks(
    mistakes: Mistakes, workplace: Workplace, tmp_path: Path, server: Server
) -> None:
    """All of a file are told at once."""
    for name, records in FILES.items():
        workplace.write_records(name, records)
    (workplace.root / "latin.jsonl").write_bytes(b'{"text": "\xe9t\xe9"}\n')
    file = workplace.write_tasks("mistaken.yaml", mistaken(mistakes))
    found = complaints(server, workplace.arguments("--save", tmp_path / "out", tasks=file))
    assert len(found) == len(mistakes), found
    for name, (_, words) in mistakes.items():
        (line,) = [line for line in found if f"task {name!r}" in line]
        assert all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


def test_two_tasks_of_one_name(workplace: Workplace, server: Server) -> None:
    entries = [{"name": "twin", **TASKS["lora"]}, {"name": "twin", **TASKS["diff"]}]
    file = workplace.root / "twins.yaml"
    file.write_text(json.dumps({"tasks": entries}))
    found = complaints(server, workplace.arguments(tasks=file))
    assert len(found) == 1 and "twin" in found[0]


def test_a_missing_task_file(workplace: Workplace, server: Server) -> None:
    found = complaints(server, workplace.arguments(tasks=workplace.root / "gone.yaml"))
    assert len(found) == 1 and "gone.yaml" in found[0]


FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "abbreviated": (["--mux-pol", "spatial"], ["--mux-pol"]),
    "per task": (["--lr", "1e-4"], ["--lr", "tasks.yaml"]),
    "a contradicting shape": (["--num-layers", "7"], ["--num-layers", "7", "4"]),
    "more tensor ranks than processes": (["--tensor-model-parallel-size", "2"], ["2"]),
    "stages that do not divide layers": (["--pipeline-model-parallel-size", "3"], ["3"]),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_mistake_in_the_flags(name: str, workplace: Workplace, server: Server) -> None:
    flags, says = FLAGS[name]
    (found,) = complaints(server, workplace.arguments(*flags))
    assert all(word in found for word in says), found


@pytest.mark.parametrize(
    ("task", "section", "key", "value", "says"),
    [
        ("lora", "data", "max_length", 500, ["lora", "max_length", "500", "64"]),
        ("prefix", "adapter", "num_virtual_tokens", 60, ["prefix", "max_length", "60", "64"]),
        ("lora", "training", "router_aux_loss_coef", 0.1, ["lora", "router_aux_loss_coef", "gpt2"]),
    ],
    ids=["sequences too long", "virtual tokens too many", "no experts to balance"],
)
def test_what_does_not_fit_the_backbone(
    task: str,
    section: str,
    key: str,
    value: Any,
    says: list[str],
    workplace: Workplace,
    tmp_path: Path,
    server: Server,
) -> None:
    backbone = tiny_models.make(tmp_path, "gpt2")
    write_tokenizer(backbone)
    tasks = {name: copy.deepcopy(TASKS[name]) for name in ("lora", "prefix")}
    tasks["lora"]["adapter"]["target_modules"] = ["c_attn"]
    tasks[task][section][key] = value
    file = workplace.write_tasks("positions.yaml", tasks)
    (found,) = complaints(server, workplace.arguments(tasks=file, backbone=backbone))
    assert all(word in found for word in says), found


def test_no_backbone(workplace: Workplace, server: Server) -> None:
    found = complaints(server, ["--mux-tasks", str(workplace.tasks)])
    assert len(found) == 1 and "--backbone" in found[0]
