"""Tasks and flags that a user can get wrong: one clear message each, exit status 2, before any weight is read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.end_to_end.complaints import complaints
from tests.end_to_end.forked import Server
from tests.end_to_end.workplace import TASKS, Workplace, write_tokenizer


@dataclass
class Mistake:
    """One thing done wrong.

    Attributes:
        make: Spoils the tasks (a deep copy) or makes files.
        says: What the one message must contain.
        problems: Number of messages.
    """

    make: Callable[[Workplace, dict[str, dict[str, Any]]], Any]
    says: list[str]
    problems: int = 1
    more: list[str] = field(default_factory=list)


def _set(*path: Any) -> Callable[[Workplace, dict[str, dict[str, Any]]], None]:
    """Set a value at a path of keys."""
    *keys, last, value = path

    def make(workplace: Workplace, tasks: dict[str, dict[str, Any]]) -> None:
        place: Any = tasks
        for key in keys:
            place = place[key]
        place[last] = value

    return make


def _records(
    name: str, *records: str | dict[str, Any]
) -> Callable[[Workplace, dict[str, dict[str, Any]]], None]:
    """Let the LoRA task read these records."""

    def make(workplace: Workplace, tasks: dict[str, dict[str, Any]]) -> None:
        workplace.write_records(name, list(records))
        tasks["lora"]["data"]["path"] = name

    return make


GOOD = {"prompt": "w1 w2", "completion": "w3"}

MISTAKES: dict[str, Mistake] = {
    "unknown key of a task": Mistake(_set("lora", "adaptor", {}), ["lora", "adaptor"]),
    "unknown key of an adapter": Mistake(_set("lora", "adapter", "rank", 4), ["lora", "rank"]),
    "unknown key of training": Mistake(_set("lora", "training", "lr", 1e-3), ["lora", "lr"]),
    "a peft field that is not done": Mistake(
        _set("lora", "adapter", "lora_bias", True), ["lora", "lora_bias"]
    ),
    "a wrong type": Mistake(_set("lora", "adapter", "r", "eight"), ["lora", "r", "eight"]),
    "a wrong range": Mistake(_set("diff", "adapter", "sparsity", 1.5), ["diff", "sparsity", "1.5"]),
    "a true where a number belongs": Mistake(
        _set("lora", "training", "max_steps", True), ["lora", "max_steps"]
    ),
    "an unknown kind": Mistake(_set("lora", "adapter", "peft_type", "LORAX"), ["lora", "LORAX"]),
    "a kind of peft that is not done": Mistake(_set("lora", "adapter", "peft_type", "OFT"), ["lora", "OFT"]),
    "an unknown schedule": Mistake(_set("lora", "training", "lr_scheduler_type", "cosin"), ["lora", "cosin"]),
    "an unknown optimizer": Mistake(_set("lora", "training", "optim", "adam8bit"), ["lora", "adam8bit"]),
    "a name that is a path": Mistake(lambda w, t: t.update({"../up": t.pop("prefix")}), ["../up"]),
    "a name of the run's own": Mistake(lambda w, t: t.update({"manifests": t.pop("prefix")}), ["manifests"]),
    "an unknown module": Mistake(
        _set("lora", "adapter", "target_modules", ["q_prj"]), ["lora", "q_prj", "q_proj"]
    ),
    "another family's module": Mistake(
        _set("diff", "adapter", "target_modules", ["c_attn"]), ["diff", "c_attn"]
    ),
    "a missing data file": Mistake(_set("lora", "data", "path", "gone.jsonl"), ["lora", "gone.jsonl"]),
    "a missing evaluation file": Mistake(_set("lora", "eval", "path", "gone.jsonl"), ["lora", "gone.jsonl"]),
    "a directory for a data file": Mistake(_set("lora", "data", "path", "backbone"), ["lora", "backbone"]),
    "a broken line": Mistake(_records("broken.jsonl", GOOD, '{"prompt": "w1', GOOD), ["broken.jsonl", "2"]),
    "a line that is no object": Mistake(_records("list.jsonl", GOOD, "[1, 2]"), ["list.jsonl", "2"]),
    "a record of no known form": Mistake(
        _records("shape.jsonl", GOOD, {"question": "w1"}), ["shape.jsonl", "2"]
    ),
    "a number for a text": Mistake(_records("number.jsonl", {"text": 5}), ["number.jsonl", "1"]),
    "an empty file": Mistake(_records("empty.jsonl"), ["empty.jsonl"]),
    "nothing to learn": Mistake(
        _records("cut.jsonl", {"prompt": "w1 " * 40, "completion": "w2"}), ["cut.jsonl", "24"]
    ),
    "no such adapter": Mistake(
        _set("lora", "adapter", "adapter_name_or_path", "nowhere"), ["lora", "nowhere"]
    ),
    "not utf-8": Mistake(
        lambda w, t: (
            (w.root / "latin.jsonl").write_bytes(b'{"text": "\xe9t\xe9"}\n'),
            _set("lora", "data", "path", "latin.jsonl")(w, t),
        ),
        ["latin.jsonl", "1"],
    ),
    "a directory of trackers that cannot be made": Mistake(
        lambda w, t: t["lora"]["training"].update(report_to=["csv"], logging_dir=str(w.tasks / "logs")),
        ["lora", "logging_dir", "logs/lora"],
    ),
    "LoRA+ without B": Mistake(
        _set("prefix", "training", "loraplus_lr_ratio", 16.0), ["prefix", "loraplus_lr_ratio", "lora_B"]
    ),
    "several at once": Mistake(
        lambda w, t: (
            _set("lora", "adapter", "r", -1)(w, t),
            _set("lora", "training", "learning_rat", 1)(w, t),
            _set("diff", "adapter", "sparsity", "much")(w, t),
        ),
        ["r", "learning_rat", "sparsity"],
        problems=3,
    ),
    "several found with the backbone": Mistake(
        lambda w, t: (
            _set("lora", "adapter", "target_modules", ["nothing"])(w, t),
            _set("lora", "data", "path", "gone.jsonl")(w, t),
            _set("diff", "data", "path", "gone.jsonl")(w, t),
        ),
        ["nothing", "gone.jsonl", "diff"],
        problems=3,
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_tasks(
    name: str,
    workplace: Workplace,
    tmp_path: Path,
    server: Server,
) -> None:
    mistake = MISTAKES[name]
    tasks = copy.deepcopy(TASKS)
    mistake.make(workplace, tasks)
    file = workplace.write_tasks("mistaken.yaml", tasks)
    found = complaints(server, workplace.arguments("--save", tmp_path / "out", *mistake.more, tasks=file))
    assert len(found) == mistake.problems, found
    for word in mistake.says:
        assert word in " ".join(found), found
    assert not (tmp_path / "out").exists()


def test_two_tasks_of_one_name(workplace: Workplace, server: Server) -> None:
    entries = [{"name": "twin", **TASKS["lora"]}, {"name": "twin", **TASKS["diff"]}]
    file = workplace.root / "twins.yaml"
    file.write_text(json.dumps({"tasks": entries}))
    found = complaints(server, workplace.arguments(tasks=file))
    assert len(found) == 1 and "twin" in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "tasks: [",
        "",
        "- a",
        "tasks: {}",
        "tasks: []",
        "task: []",
        "tasks: 5",
        "\0",
        "tasks: [{name: x}]",
        "!!python/object:os.system {}",
    ],
)
def test_a_task_file_that_is_none(text: str, workplace: Workplace, server: Server) -> None:
    file = workplace.root / "none.yaml"
    file.write_text(text)
    found = complaints(server, workplace.arguments(tasks=file))
    assert "none.yaml" in found[0]


def test_a_missing_task_file(workplace: Workplace, server: Server) -> None:
    found = complaints(server, workplace.arguments(tasks=workplace.root / "gone.yaml"))
    assert len(found) == 1 and "gone.yaml" in found[0]


FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "unknown": (["--mux-polizy", "spatial"], ["--mux-polizy"]),
    "abbreviated": (["--mux-pol", "spatial"], ["--mux-pol"]),
    "a wrong choice": (["--mux-policy", "fastest"], ["fastest"]),
    "a wrong type": (["--save-interval", "often"], ["--save-interval", "often"]),
    "per task": (["--lr", "1e-4"], ["--lr", "tasks.yaml"]),
    "per task, too": (["--micro-batch-size", "2"], ["--micro-batch-size", "tasks.yaml"]),
    "Megatron's, not supported": (["--fp8-format", "hybrid"], ["--fp8-format"]),
    "a contradicting shape": (["--num-layers", "7"], ["--num-layers", "7", "4"]),
    "more tensor ranks than processes": (["--tensor-model-parallel-size", "2"], ["2"]),
    "tensor ranks that do not divide anything": (["--tensor-model-parallel-size", "3"], ["3"]),
    "stages that do not divide layers": (["--pipeline-model-parallel-size", "3"], ["3"]),
    "zero stages": (["--pipeline-model-parallel-size", "0"], ["--pipeline-model-parallel-size"]),
    "a backbone given to --load": (["--load", "BACKBONE"], ["--backbone"]),
    "a file for --save": (["--save", "TASKS"], ["--save"]),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_mistake_in_the_flags(name: str, workplace: Workplace, server: Server) -> None:
    flags, says = FLAGS[name]
    places = {"BACKBONE": str(workplace.backbone), "TASKS": str(workplace.tasks)}
    found = complaints(server, workplace.arguments(*(places.get(flag, flag) for flag in flags)))
    assert len(found) == (2 if name == "tensor ranks that do not divide anything" else 1), found
    for word in says:
        assert word in found[0], found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("lora", "data", "max_length", 500), ["lora", "max_length", "500", "64"]),
        (_set("prefix", "adapter", "num_virtual_tokens", 60), ["prefix", "max_length", "60", "64"]),
        (_set("lora", "training", "router_aux_loss_coef", 0.1), ["lora", "router_aux_loss_coef", "gpt2"]),
    ],
    ids=["sequences too long", "virtual tokens too many", "no experts to balance"],
)
def test_what_does_not_fit_the_backbone(
    change: Callable[[Workplace, dict[str, dict[str, Any]]], None],
    says: list[str],
    workplace: Workplace,
    tmp_path: Path,
    server: Server,
) -> None:
    backbone = tiny_models.make(tmp_path, "gpt2")
    write_tokenizer(backbone)
    tasks = {name: copy.deepcopy(TASKS[name]) for name in ("lora", "prefix")}
    tasks["lora"]["adapter"]["target_modules"] = ["c_attn"]
    change(workplace, tasks)
    file = workplace.write_tasks("positions.yaml", tasks)
    found = complaints(server, workplace.arguments(tasks=file, backbone=backbone))
    assert len(found) == 1, found
    for word in says:
        assert word in found[0], found


def test_no_backbone(workplace: Workplace, server: Server) -> None:
    found = complaints(server, ["--mux-tasks", str(workplace.tasks)])
    assert len(found) == 1 and "--backbone" in found[0]
