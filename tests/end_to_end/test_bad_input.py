"""What a user can get wrong: one clear message each, exit status 2, no traceback, nothing half-written."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import pretrain_mux
from tests import tiny_models
from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.workplace import TASKS, Workplace, furnish, write_tokenizer


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return furnish(tmp_path_factory.mktemp("bad-input"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("runs")) as running:
        yield running


def complaints(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run in this process; the lines of standard error, after the checks that hold for every mistake."""
    try:
        status = pretrain_mux.main(arguments)
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    check_manners(status, captured.err)
    return [line.removeprefix("pretrain_mux.py: ") for line in captured.err.splitlines()]


def check_manners(status: int, errors: str) -> None:
    """Exit status 2 and nothing but our own lines."""
    assert status == 2, errors
    assert "Traceback" not in errors
    assert errors.strip()
    for line in errors.splitlines():
        assert line.startswith("pretrain_mux.py: "), errors
        assert len(line) < 600, line


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
    "a peft field that is not done": Mistake(_set("lora", "adapter", "use_dora", True), ["lora", "use_dora"]),
    "a wrong type": Mistake(_set("lora", "adapter", "r", "eight"), ["lora", "r", "eight"]),
    "a wrong range": Mistake(_set("diff", "adapter", "sparsity", 1.5), ["diff", "sparsity", "1.5"]),
    "a true where a number belongs": Mistake(
        _set("lora", "training", "max_steps", True), ["lora", "max_steps"]
    ),
    "an unknown kind": Mistake(_set("lora", "adapter", "peft_type", "LORAX"), ["lora", "LORAX"]),
    "a kind of peft that is not done": Mistake(
        _set("lora", "adapter", "peft_type", "VERA"), ["lora", "VERA"]
    ),
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
    "a record of no known shape": Mistake(
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
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistake = MISTAKES[name]
    tasks = copy.deepcopy(TASKS)
    mistake.make(workplace, tasks)
    file = workplace.write_tasks("mistaken.yaml", tasks)
    refuse_to_read_weights(monkeypatch)
    found = complaints(workplace.arguments("--save", tmp_path / "out", *mistake.more, tasks=file), capsys)
    assert len(found) == mistake.problems, found
    for word in mistake.says:
        assert word in " ".join(found), found
    assert not (tmp_path / "out").exists()


def refuse_to_read_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the tasks is found before any weight is read."""
    from megatron_mux.backbone.model import Backbone

    def load(*arguments: Any, **more: Any) -> None:
        raise AssertionError("the backbone was loaded although the tasks are wrong")

    monkeypatch.setattr(Backbone, "load", load)


def test_two_tasks_of_one_name(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [{"name": "twin", **TASKS["lora"]}, {"name": "twin", **TASKS["diff"]}]
    file = workplace.root / "twins.yaml"
    file.write_text(json.dumps({"tasks": entries}))
    found = complaints(workplace.arguments(tasks=file), capsys)
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
def test_a_task_file_that_is_none(
    text: str, workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    file = workplace.root / "none.yaml"
    file.write_text(text)
    found = complaints(workplace.arguments(tasks=file), capsys)
    assert "none.yaml" in found[0]


def test_a_missing_task_file(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    found = complaints(workplace.arguments(tasks=workplace.root / "gone.yaml"), capsys)
    assert len(found) == 1 and "gone.yaml" in found[0]


FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "unknown": (["--mux-polizy", "spatial"], ["--mux-polizy"]),
    "abbreviated": (["--mux-pol", "spatial"], ["--mux-pol"]),
    "a wrong choice": (["--mux-policy", "fastest"], ["fastest"]),
    "a wrong type": (["--save-interval", "often"], ["--save-interval", "often"]),
    "per task": (["--lr", "1e-4"], ["--lr", "tasks.yaml"]),
    "per task, too": (["--micro-batch-size", "2"], ["--micro-batch-size", "tasks.yaml"]),
    "Megatron's, not honoured": (["--use-distributed-optimizer"], ["--use-distributed-optimizer"]),
    "a contradicting shape": (["--num-layers", "7"], ["--num-layers", "7", "4"]),
    "more tensor ranks than processes": (["--tensor-model-parallel-size", "2"], ["2"]),
    "tensor ranks that do not divide anything": (["--tensor-model-parallel-size", "3"], ["3"]),
    "stages that do not divide layers": (["--pipeline-model-parallel-size", "3"], ["3"]),
    "zero stages": (["--pipeline-model-parallel-size", "0"], ["--pipeline-model-parallel-size"]),
    "a backbone given to --load": (["--load", "BACKBONE"], ["--backbone"]),
    "a file for --save": (["--save", "TASKS"], ["--save"]),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_mistake_in_the_flags(
    name: str, workplace: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, says = FLAGS[name]
    places = {"BACKBONE": str(workplace.backbone), "TASKS": str(workplace.tasks)}
    refuse_to_read_weights(monkeypatch)
    found = complaints(workplace.arguments(*(places.get(flag, flag) for flag in flags)), capsys)
    assert len(found) == (2 if name == "tensor ranks that do not divide anything" else 1), found
    for word in says:
        assert word in found[0], found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("lora", "data", "max_length", 500), ["lora", "max_length", "500", "64"]),
        (_set("prefix", "adapter", "num_virtual_tokens", 60), ["prefix", "max_length", "60", "64"]),
    ],
    ids=["sequences too long", "virtual tokens too many"],
)
def test_more_positions_than_the_backbone_has(
    change: Callable[[Workplace, dict[str, dict[str, Any]]], None],
    says: list[str],
    workplace: Workplace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = tiny_models.make(tmp_path, "gpt2")
    write_tokenizer(backbone)
    tasks = {name: copy.deepcopy(TASKS[name]) for name in ("lora", "prefix")}
    tasks["lora"]["adapter"]["target_modules"] = ["c_attn"]
    change(workplace, tasks)
    file = workplace.write_tasks("positions.yaml", tasks)
    refuse_to_read_weights(monkeypatch)
    capsys.readouterr()
    found = complaints(workplace.arguments(tasks=file, backbone=backbone), capsys)
    assert len(found) == 1, found
    for word in says:
        assert word in found[0], found


def test_no_backbone(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    found = complaints(["--mux-tasks", str(workplace.tasks)], capsys)
    assert len(found) == 1 and "--backbone" in found[0]


def spoil_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


BACKBONES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (lambda d: shutil.rmtree(d), []),
    "no config": (lambda d: (d / "config.json").unlink(), ["config.json"]),
    "a broken config": (lambda d: (d / "config.json").write_text("{"), ["config.json"]),
    "an unknown family": (
        lambda d: spoil_config(d, model_type="mamba", architectures=["MambaForCausalLM"]),
        ["mamba"],
    ),
    "what we do not do": (
        lambda d: spoil_config(d, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ["yarn"],
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ["safetensors"]),
    "weights cut off": (lambda d: cut(d / "model.safetensors", 0.5), ["model.safetensors"]),
    "weights that are none": (lambda d: (d / "model.safetensors").write_text("hello"), ["model.safetensors"]),
    "weights of another shape": (lambda d: spoil_config(d, intermediate_size=48), ["48"]),
    "more layers than weights": (lambda d: spoil_config(d, num_hidden_layers=6), ["model.layers.4"]),
    "no tokenizer": (lambda d: [p.unlink() for p in d.glob("tokenizer*")], ["tokenizer"]),
    "a broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{"), ["tokenizer"]),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_that_cannot_be_used(
    name: str, workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, says = BACKBONES[name]
    directory = tmp_path / "spoiled"
    shutil.copytree(workplace.backbone, directory)
    spoil(directory)
    found = complaints(workplace.arguments("--save", tmp_path / "out", backbone=directory), capsys)
    assert len(found) == 1, found
    for word in [*says, "spoiled" if not says else ""]:
        assert word in found[0], found
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def finished(workplace: Workplace, server: Server) -> Path:
    """A run that is over, to continue or to start from."""
    directory = workplace.root / "finished"
    run = server.run(workplace.arguments("--save", directory, "--save-interval", "3"))
    assert run.status == 0, run.errors
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()
    }


def test_saving_onto_a_run(workplace: Workplace, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(finished)
    found = complaints(workplace.arguments("--save", finished), capsys)
    assert len(found) == 1 and "--load" in found[0] and str(finished) in found[0]
    assert content(finished) == before


def test_continuing_on_another_backbone(
    workplace: Workplace, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_models.make(tmp_path, "llama", seed=9)
    write_tokenizer(other)
    capsys.readouterr()
    before = content(finished)
    found = complaints(workplace.arguments("--save", finished, "--load", finished, backbone=other), capsys)
    assert len(found) == 1 and "backbone" in found[0]
    assert content(finished) == before


def test_continuing_with_a_changed_task(
    workplace: Workplace, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = copy.deepcopy(TASKS)
    tasks["lora"]["training"]["learning_rate"] = 0.5
    file = workplace.write_tasks("changed.yaml", tasks)
    before = content(finished)
    found = complaints(workplace.arguments("--save", finished, "--load", finished, tasks=file), capsys)
    assert len(found) == 1 and "learning_rate" in found[0] and "lora" in found[0]
    assert content(finished) == before


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "cut off": (lambda d: cut(d / "adapter_model.safetensors", 0.5), ["adapter_model.safetensors"]),
    "not safetensors": (
        lambda d: (d / "adapter_model.safetensors").write_text("x"),
        ["adapter_model.safetensors"],
    ),
    "no weights": (lambda d: (d / "adapter_model.safetensors").unlink(), ["adapter_model.safetensors"]),
    "no config": (lambda d: (d / "adapter_config.json").unlink(), ["adapter_config.json"]),
    "another rank": (lambda d: spoil_config_of_adapter(d, r=2), ["r"]),
    "another kind": (lambda d: become(d, d.parent / "other-kind"), ["PREFIX_TUNING"]),
    "DoRA": (lambda d: spoil_config_of_adapter(d, use_dora=True), ["use_dora"]),
}


def become(directory: Path, other: Path) -> None:
    shutil.rmtree(directory)
    other.rename(directory)


def spoil_config_of_adapter(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_adapter_that_cannot_be_started_from(
    name: str,
    workplace: Workplace,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil, says = CHECKPOINTS[name]
    directory = tmp_path / "start"
    shutil.copytree(finished / "lora" / "checkpoint-14", directory)
    shutil.copytree(finished / "prefix" / "checkpoint-7", tmp_path / "other-kind")
    spoil(directory)
    tasks = {"lora": copy.deepcopy(TASKS["lora"])}
    tasks["lora"]["adapter"]["adapter_name_or_path"] = str(directory)
    file = workplace.write_tasks("start.yaml", tasks)
    refuse_to_read_weights(monkeypatch)
    found = complaints(workplace.arguments(tasks=file), capsys)
    assert len(found) == 1, found
    for word in says:
        assert word in found[0], found


def test_an_adapter_of_another_backbone(
    workplace: Workplace, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_models.make(tmp_path, "llama", hidden_size=48, head_dim=12)
    write_tokenizer(other)
    capsys.readouterr()
    tasks = {"lora": copy.deepcopy(TASKS["lora"])}
    tasks["lora"]["adapter"]["adapter_name_or_path"] = str(finished / "lora" / "checkpoint-14")
    file = workplace.write_tasks("other.yaml", tasks)
    found = complaints(workplace.arguments(tasks=file, backbone=other), capsys)
    assert len(found) == 1 and "lora" in found[0]


def test_a_checkpoint_that_cannot_be_read_on_resume(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    directory = tmp_path / "interrupted"
    fault = Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 14, "kill before")
    server.run(workplace.arguments("--save", directory, "--save-interval", "3"), fault=fault)
    cut(directory / "lora" / "checkpoint-3" / "training_state.safetensors", 0.5)
    run = server.run(workplace.arguments("--save", directory, "--load", directory))
    check_manners(run.status, run.errors)
    assert len(run.errors.splitlines()) == 1 and str(directory / "lora" / "checkpoint-3") in run.errors


FULL_DISKS: dict[str, tuple[Fault | None, int | None]] = {
    "while an adapter is written": (Fault("safetensors.torch:save_file", 3, "no space"), None),
    "while a manifest is written": (Fault("megatron_mux.checkpoint:os.replace", 3, "no space"), None),
    "while a checkpoint is renamed": (Fault("os:rename", 4, "no space"), None),
    # A real refusal by the operating system, in the middle of a write.
    "while files grow": (None, 9000),
}


@pytest.mark.parametrize("name", FULL_DISKS)
def test_a_full_disk(name: str, workplace: Workplace, server: Server, finished: Path, tmp_path: Path) -> None:
    fault, largest = FULL_DISKS[name]
    directory = tmp_path / "full"
    flags = ["--save", directory, "--save-interval", "3"]
    run = server.run(workplace.arguments(*flags), fault=fault, largest_file=largest)
    check_manners(run.status, run.errors)
    assert len(run.errors.splitlines()) == 1 and str(directory) in run.errors
    assert not [path for path in directory.rglob("*") if path.name.startswith(".partial")]
    # What was saved before is complete, and the run goes on once there is room.
    again = server.run(workplace.arguments(*flags, "--load", directory))
    assert again.status == 0, again.errors
    for task, steps in (("lora", 14), ("diff", 12), ("prefix", 7)):
        last = f"{task}/checkpoint-{steps}/adapter_model.safetensors"
        assert (directory / last).read_bytes() == (finished / last).read_bytes()


def test_a_place_that_cannot_be_written(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    found = complaints(workplace.arguments("--save", tmp_path / "file" / "run"), capsys)
    assert len(found) == 1 and "--save" in found[0]
