"""Directories that are not what they should be, and disks that are full: one message, nothing half-written."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_mux.directory_lock import LOCK
from tests import tiny_models
from tests.end_to_end.complaints import check_manners, complaints
from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.harness import assert_close
from tests.end_to_end.workplace import TASKS, Workplace, write_tokenizer


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def without_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


BACKBONES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (shutil.rmtree, []),
    "no config": (lambda d: (d / "config.json").unlink(), ["config.json"]),
    "weights cut off": (lambda d: cut(d / "model.safetensors", 0.5), ["model.safetensors"]),
    "no tokenizer": (without_tokenizer, ["tokenizer"]),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_that_cannot_be_used(
    name: str, workplace: Workplace, tmp_path: Path, server: Server
) -> None:
    spoil, says = BACKBONES[name]
    directory = tmp_path / "spoiled"
    shutil.copytree(workplace.backbone, directory)
    spoil(directory)
    found = complaints(
        server, workplace.arguments("--save", tmp_path / "out", backbone=directory), before_weights=False
    )
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
    """All files but the lock: that of a run that was killed goes with the next one."""
    files = (p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != LOCK)
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def test_saving_where_nothing_can_be_written(workplace: Workplace, server: Server) -> None:
    (found,) = complaints(server, workplace.arguments("--save", "/proc/nowhere"))
    assert found.startswith("--save /proc/nowhere: cannot be written")


def test_saving_onto_a_run(workplace: Workplace, finished: Path, server: Server) -> None:
    before = content(finished)
    found = complaints(server, workplace.arguments("--save", finished))
    assert len(found) == 1 and "--load" in found[0] and str(finished) in found[0]
    assert content(finished) == before


def test_continuing_on_another_backbone(
    workplace: Workplace, finished: Path, tmp_path: Path, server: Server
) -> None:
    other = tiny_models.make(tmp_path, "llama", seed=9)
    write_tokenizer(other)
    before = content(finished)
    found = complaints(server, workplace.arguments("--save", finished, "--load", finished, backbone=other))
    assert len(found) == 1 and "backbone" in found[0]
    assert content(finished) == before


def test_continuing_with_a_changed_task(workplace: Workplace, finished: Path, server: Server) -> None:
    tasks = copy.deepcopy(TASKS)
    tasks["lora"]["training"]["learning_rate"] = 0.5
    file = workplace.write_tasks("changed.yaml", tasks)
    before = content(finished)
    found = complaints(server, workplace.arguments("--save", finished, "--load", finished, tasks=file))
    assert len(found) == 2 and "learning_rate" in found[0] and "lora" in found[0]
    assert "a task that continues may change training.max_steps" in found[1]
    assert content(finished) == before


def test_continuing_with_other_data(
    workplace: Workplace, finished: Path, server: Server, tmp_path: Path
) -> None:
    tasks = copy.deepcopy(TASKS)
    records = (workplace.root / "pairs.jsonl").read_text().splitlines()
    tasks["lora"]["data"]["path"] = str(workplace.write_records("other.jsonl", records[::-1]))
    file = workplace.write_tasks("other-data.yaml", tasks)
    directory = tmp_path / "interrupted"
    fault = Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 20, "kill before")
    server.run(workplace.arguments("--save", directory, "--save-interval", "3"), fault=fault)
    before = content(directory)
    found = complaints(
        server,
        workplace.arguments("--save", directory, "--load", directory, tasks=file),
        before_weights=False,
    )
    assert len(found) == 1 and "lora" in found[0] and "other.jsonl" in found[0]
    assert content(directory) == before


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "cut off": (lambda d: cut(d / "adapter_model.safetensors", 0.5), ["adapter_model.safetensors"]),
    "another rank": (lambda d: spoil_config_of_adapter(d, r=2), ["r"]),
    "another kind": (lambda d: become(d, d.parent / "other-kind"), ["PREFIX_TUNING"]),
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
    server: Server,
) -> None:
    spoil, says = CHECKPOINTS[name]
    directory = tmp_path / "start"
    shutil.copytree(finished / "lora" / "checkpoint-14", directory)
    shutil.copytree(finished / "prefix" / "checkpoint-7", tmp_path / "other-kind")
    spoil(directory)
    tasks = {"lora": copy.deepcopy(TASKS["lora"])}
    tasks["lora"]["adapter"]["adapter_name_or_path"] = str(directory)
    file = workplace.write_tasks("start.yaml", tasks)
    found = complaints(server, workplace.arguments(tasks=file))
    assert len(found) == 1, found
    for word in says:
        assert word in found[0], found


def test_an_adapter_of_another_backbone(
    workplace: Workplace, finished: Path, tmp_path: Path, server: Server
) -> None:
    other = tiny_models.make(tmp_path, "llama", hidden_size=48, head_dim=12)
    write_tokenizer(other)
    tasks = {"lora": copy.deepcopy(TASKS["lora"])}
    tasks["lora"]["adapter"]["adapter_name_or_path"] = str(finished / "lora" / "checkpoint-14")
    file = workplace.write_tasks("other.yaml", tasks)
    found = complaints(server, workplace.arguments(tasks=file, backbone=other))
    assert len(found) == 1 and "lora" in found[0]


def test_a_checkpoint_that_is_cut_off_with_an_older_save(
    workplace: Workplace, server: Server, finished: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "interrupted"
    fault = Fault("megatron_mux.checkpoint:write_tensors", 13, "kill before")  # in its third save
    flags: list[str | Path] = ["--save", directory, "--save-interval", "3"]
    server.run(workplace.arguments(*flags), fault=fault)
    newest = max((directory / "manifests").iterdir()).name
    (damaged,) = {t["checkpoint"] for t in tasks_of(directory / "manifests" / newest) if t["name"] == "lora"}
    file = "training_state.safetensors"
    cut(directory / damaged / file, 0.5)
    run = server.run(workplace.arguments(*flags, "--load", directory))
    assert run.status == 0, run.errors
    assert (
        f"lora goes back to save 1, since {newest} names {damaged}/{file}, which cannot be read" in run.output
    )
    for task, steps in (("lora", 14), ("diff", 12), ("prefix", 7)):
        last = f"{task}/checkpoint-{steps}/adapter_model.safetensors"
        ours, theirs = load_file(directory / last), load_file(finished / last)
        assert_close(ours, theirs, 1e-5, task)  # other tasks were beside it in the steps that are done again


def tasks_of(manifest: Path) -> list[dict[str, Any]]:
    tasks: list[dict[str, Any]] = json.loads(manifest.read_text())["tasks"]
    return tasks


FULL_DISKS: dict[str, tuple[Fault | None, int | None]] = {
    "while an adapter is written": (Fault("megatron_mux.checkpoint:write_tensors", 3, "no space"), None),
    "while a manifest is written": (Fault("megatron_mux.files:os.replace", 4, "no space"), None),
    "while a checkpoint is renamed": (Fault("os:rename", 4, "no space"), None),
    # A real refusal by the operating system, in the middle of a write.
    "while files grow": (None, 9000),
}


@pytest.mark.parametrize("name", FULL_DISKS)
def test_a_full_disk(name: str, workplace: Workplace, server: Server, finished: Path, tmp_path: Path) -> None:
    fault, largest = FULL_DISKS[name]
    directory = tmp_path / "full"
    flags: list[str | Path] = ["--save", directory, "--save-interval", "3"]
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


def test_a_full_disk_below_tensorboard(
    workplace: Workplace, server: Server, finished: Path, tmp_path: Path
) -> None:
    fault = Fault("megatron_mux.report:EventFile._write", 20, "no space")
    directory = tmp_path / "full"
    flags: list[str | Path] = ["--save", directory, "--save-interval", "3"]
    run = server.run(workplace.arguments(*flags, "--tensorboard-dir", tmp_path / "board"), fault=fault)
    check_manners(run.status, run.errors)
    (line,) = run.errors.splitlines()
    assert (
        f"--tensorboard-dir {tmp_path / 'board'}: could not write: No space left" in line and "--load" in line
    )
    again = server.run(workplace.arguments(*flags, "--load", directory))
    assert again.status == 0, again.errors
    for task, steps in (("lora", 14), ("diff", 12), ("prefix", 7)):
        last = f"{task}/checkpoint-{steps}/adapter_model.safetensors"
        assert (directory / last).read_bytes() == (finished / last).read_bytes()


def test_a_place_that_cannot_be_written(workplace: Workplace, tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").write_text("in the way")
    found = complaints(server, workplace.arguments("--save", tmp_path / "file" / "run"), before_weights=False)
    assert len(found) == 1 and "--save" in found[0]
