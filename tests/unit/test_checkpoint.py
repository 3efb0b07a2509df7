"""Saves are atomic: whatever fails, the newest manifest names complete checkpoints."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux import checkpoint, files, saved_files, tensor_file
from megatron_mux.checkpoint import SavedTask, TaskToSave
from megatron_mux.engine import Planning, Snapshot
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import plan_for
from megatron_mux.training.loop_setup import changes_since

PLAN = plan_for("spatial", {"a": 1}, 1)


def _state(step: int, name: str = "a", value: float = 0.0) -> TaskToSave:
    snapshot = Snapshot(
        step,
        adapter={"k.lora_A.weight": torch.full((2, 3), value)},
        moments={"k.lora_A.weight": {"exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.zeros(2, 3)}},
        extra={"k.lora_A.weight": torch.arange(3)},
    )
    return TaskToSave(
        SavedTask(name, step, "running", "", "", {"name": name}, "data"), snapshot, {"peft_type": "LORA"}
    )


def test_a_save_is_loaded_as_it_was(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, [_state(3, value=1.5)], PLAN, "backbone")
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None and manifest.tasks[0].checkpoint == "a/checkpoint-3"
    snapshot = checkpoint.load_task(tmp_path, manifest.tasks[0])
    expected = _state(3, value=1.5).snapshot
    assert expected is not None
    assert snapshot.step == 3
    assert torch.equal(snapshot.adapter["k.lora_A.weight"], expected.adapter["k.lora_A.weight"])
    assert torch.equal(snapshot.moments["k.lora_A.weight"]["exp_avg"], torch.ones(2, 3))
    assert torch.equal(snapshot.extra["k.lora_A.weight"], torch.arange(3))
    assert json.loads((tmp_path / "a/checkpoint-3/adapter_config.json").read_text())["peft_type"] == "LORA"
    assert not list(tmp_path.rglob(".partial*"))


def test_a_full_disk_leaves_what_was_saved_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    real = files.write
    for failing in range(5):  # config, adapter, training state, manifest, plan
        calls = 0

        def full(path: Path, *content: bytes, failing: int = failing, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > failing:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            real(path, *content, **options)

        for module in (checkpoint, files, tensor_file):
            monkeypatch.setattr(module, "write", full)
        with pytest.raises(UserError, match=r"could not save: No space left.*--load"):
            checkpoint.save(tmp_path, [_state(2 + failing)], PLAN, "backbone")
        manifest = checkpoint.load(tmp_path, "backbone")
        assert manifest is not None
        checkpoint.load_task(tmp_path, manifest.tasks[0])
        assert not list(tmp_path.rglob(".partial*")), "nothing half-written"


def test_a_checkpoint_without_a_manifest_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    orphan = tmp_path / "a" / "checkpoint-2"
    orphan.mkdir()
    (orphan / "adapter_model.safetensors").write_text("half")
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None and manifest.tasks[0].step == 1
    checkpoint.save(tmp_path, [_state(2)], PLAN, "backbone")
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None and checkpoint.load_task(tmp_path, manifest.tasks[0]).step == 2


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"format": 2, "tasks": [{}]}'])
def test_a_broken_newest_manifest_falls_back_to_the_one_before(tmp_path: Path, content: bytes) -> None:
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    (tmp_path / "manifests" / "manifest-00000009.json").write_bytes(content)
    said: list[str] = []
    manifest = checkpoint.load(tmp_path, "backbone", said.append)
    assert manifest is not None and manifest.number == 1
    (line,) = said
    assert "going back to save 1" in line and "manifest-00000009.json is damaged" in line
    for step in (2, 3):
        assert checkpoint.save(tmp_path, [_state(step)], PLAN, "backbone", keep=2).number == 8 + step
    said.clear()
    manifest = checkpoint.load(tmp_path, "backbone", said.append)
    assert manifest is not None and manifest.number == 11 and not said


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


SPOILT = {
    "cut off": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: path.write_text("not safetensors"),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "training_state.safetensors"])
def test_a_save_with_a_spoilt_file_is_passed_over_and_named(
    file: str, spoil: Callable[[Path], object], tmp_path: Path
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, [_state(step)], PLAN, "backbone")
    spoil(tmp_path / "a/checkpoint-2" / file)
    said: list[str] = []
    manifest = checkpoint.load(tmp_path, "backbone", said.append)
    assert manifest is not None and manifest.number == 1
    checkpoint.load_task(tmp_path, manifest.tasks[0])
    (line,) = said
    assert "going back to save 1" in line and f"manifest-00000002.json names a/checkpoint-2/{file}" in line
    assert ("which is not there" in line) == (spoil is SPOILT["gone"])
    # Continued from there, the run comes by the spoilt checkpoint again and writes it anew.
    checkpoint.save(tmp_path, [_state(2, value=5.0)], PLAN, "backbone")
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None and manifest.number == 3
    assert (checkpoint.load_task(tmp_path, manifest.tasks[0]).adapter["k.lora_A.weight"] == 5.0).all()
    for step in (1, 2):
        spoil(tmp_path / f"a/checkpoint-{step}" / file)
    with pytest.raises(UserError, match=rf"cannot be continued.*names a/checkpoint-2/{file}, which "):
        checkpoint.load(tmp_path, "backbone")


def test_of_a_task_that_is_over_the_adapter_alone_must_be_there(tmp_path: Path) -> None:
    for step, status in ((1, "running"), (2, "finished")):
        state = _state(step)
        state.entry.status = status
        checkpoint.save(tmp_path, [state], PLAN, "backbone")
    (tmp_path / "a/checkpoint-2/training_state.safetensors").unlink()
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None and manifest.number == 2
    _cut(tmp_path / "a/checkpoint-2/adapter_model.safetensors")
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None and manifest.number == 1


def test_a_good_checkpoint_that_is_spoilt_is_good_no_more(tmp_path: Path) -> None:
    for step in (1, 2):
        state = _state(step)
        state.entry.good = "a/checkpoint-1"
        checkpoint.save(tmp_path, [state], PLAN, "backbone")
    _cut(tmp_path / "a/checkpoint-1/adapter_model.safetensors")
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None and manifest.number == 2
    assert (manifest.tasks[0].checkpoint, manifest.tasks[0].good) == ("a/checkpoint-2", "")


@pytest.mark.parametrize(
    "name",
    ["(copy)", "-00000001 (copy)", "-00000009.bak", "-9", "-000000009", "-00000009-1", "-0000000\u0669"],
)
def test_a_file_of_another_name_is_no_manifest(name: str, tmp_path: Path) -> None:
    odd = tmp_path / "manifests" / f"manifest{name}.json"
    odd.parent.mkdir()
    odd.write_text("{")
    saved_files.refuse_used(tmp_path)
    for step in (1, 2):
        assert checkpoint.save(tmp_path, [_state(step)], PLAN, "backbone", keep=1).number == step
    said: list[str] = []
    manifest = checkpoint.load(tmp_path, "backbone", said.append)
    assert manifest is not None and manifest.number == 2 and not said
    assert odd.read_text() == "{"


def test_a_save_of_another_layout_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    path = tmp_path / "manifests" / "manifest-00000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(UserError, match=r"another version of megatron-mux \(format 1\)"):
        checkpoint.load(tmp_path, "backbone")


def test_another_backbone_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    with pytest.raises(UserError, match="another backbone"):
        checkpoint.load(tmp_path, "other")


def test_saving_onto_a_run_is_refused_and_an_empty_directory_is_not(tmp_path: Path) -> None:
    saved_files.refuse_used(tmp_path / "missing")
    saved_files.refuse_used(tmp_path)
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    with pytest.raises(UserError, match="holds checkpoints of a run already"):
        saved_files.refuse_used(tmp_path)


def test_keeping_few_prunes_old_checkpoints_but_not_named_ones(tmp_path: Path) -> None:
    done = checkpoint.save(tmp_path, [_state(5, "done")], PLAN, "backbone").tasks[0]
    for step in (1, 2, 3):
        states = [TaskToSave(replace(done)), _state(step)]
        checkpoint.save(tmp_path, states, PLAN, "backbone", keep=1)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["checkpoint-3"]
    assert (tmp_path / "done" / "checkpoint-5").is_dir()
    assert len(list((tmp_path / "manifests").iterdir())) == 1


def test_keeping_few_keeps_what_was_good(tmp_path: Path) -> None:
    """A loss that has exploded is still finite: what was saved before it did is not dropped for it.

    The fourth loss is measured on what the third step left: the third checkpoint is the first bad one.
    """
    entry = _state(1).entry
    known = []
    for step, loss in enumerate([2.0, 1.9, 2.2, 9.0, 11.0, 30.0], start=1):
        entry.note(step, loss)
        known.append(entry.good)
        state = _state(step)
        state.entry = replace(entry, step=step)
        entry = checkpoint.save(tmp_path, [state], PLAN, "backbone", keep=1).tasks[0]
    assert known == ["", "a/checkpoint-1", *["a/checkpoint-2"] * 4]
    assert (entry.checkpoint, entry.good) == ("a/checkpoint-6", "a/checkpoint-2")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["checkpoint-2", "checkpoint-6"]
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None and manifest.tasks == [entry], "a continued run knows as much"
    entry.fall_back()
    checkpoint.save(tmp_path, [TaskToSave(entry)], PLAN, "backbone", keep=1)
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None
    assert (manifest.tasks[0].checkpoint, manifest.tasks[0].step) == ("a/checkpoint-2", 2)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["checkpoint-2"]


def test_a_negative_loss_that_falls_loses_no_step_to_a_later_nan(tmp_path: Path) -> None:
    """Robust DPO's loss falls below -1; the task that fails in the end keeps its newest checkpoint."""
    entry = _state(1).entry
    for step in range(1, 13):
        entry.note(step, 0.5 - 0.8 * step)
        entry = checkpoint.save(
            tmp_path, [replace(_state(step), entry=replace(entry, step=step))], PLAN, "backbone"
        ).tasks[0]
    entry.note(13, -9.9)
    entry.health.note(float("nan"))
    assert not entry.health.good and entry.good == "a/checkpoint-12"
    entry.fall_back()
    assert entry.step == 12


def test_a_checkpoint_is_good_by_the_next_step_alone(tmp_path: Path) -> None:
    """Neither by the loss before it, nor by one of a later step, which tells of what came after it."""
    entry = _state(3).entry
    entry.note(3, 2.0)
    entry = checkpoint.save(tmp_path, [replace(_state(3), entry=entry)], PLAN, "backbone").tasks[0]
    assert entry.good == ""
    for step, loss in ((4, 50.0), (5, 2.0)):
        entry.note(step, loss)
        assert entry.good == "", f"after step {step}"
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None
    resumed = manifest.tasks[0]
    resumed.note(4, 2.1)
    assert resumed.good == "a/checkpoint-3", "a run continued from it learns what one that went on does"


def test_without_a_good_checkpoint_the_newest_stays_named(tmp_path: Path) -> None:
    state = _state(1)
    state.entry.health.note(float("nan"))
    entry = checkpoint.save(tmp_path, [state], PLAN, "backbone").tasks[0]
    entry.fall_back()
    assert (entry.checkpoint, entry.step, entry.good) == ("a/checkpoint-1", 1, "")


def test_an_unreadable_checkpoint_is_named(tmp_path: Path) -> None:
    manifest = checkpoint.save(tmp_path, [_state(2)], PLAN, "backbone")
    (tmp_path / "a/checkpoint-2/adapter_model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match=r"checkpoint-2.*cannot be read"):
        checkpoint.load_task(tmp_path, manifest.tasks[0])


def test_a_manifest_says_in_what_the_run_computed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone", precision="float32 with TF32")
    (path,) = (tmp_path / "manifests").iterdir()
    found = checkpoint.load(tmp_path, "backbone")
    assert found is not None and found.precision == "float32 with TF32"
    planning = Planning("spatial", 1)
    assert list(changes_since(found, planning, "float32 with TF32")) == []
    (said,) = changes_since(found, planning, "bfloat16")
    assert "in float32 with TF32: going on in bfloat16" in said
    (said,) = changes_since(found, Planning("temporal", 1), "float32 with TF32")
    assert "policy spatial on 1 stage(s): going on with temporal" in said
    # Manifests of earlier versions do not say it.
    value = json.loads(path.read_text())
    del value["precision"]
    path.write_text(json.dumps(value))
    old = checkpoint.load(tmp_path, "backbone")
    assert old is not None and list(changes_since(old, planning, "bfloat16")) == []


def _unmoved(entry: SavedTask) -> TaskToSave:
    """Of a task that a save only names."""
    return TaskToSave(replace(entry))


def _save_in_turns(directory: Path, keep: int | None = None) -> None:
    """Save tasks a and b at step 1, b at step 2, then a alone at steps 2 to 4."""
    first, other = _state(1), _state(1, "b")
    checkpoint.save(directory, [first, other], PLAN, "backbone", keep)
    other = _state(2, "b")
    checkpoint.save(directory, [_unmoved(first.entry), other], PLAN, "backbone", keep)
    for step in (2, 3, 4):
        checkpoint.save(directory, [_state(step), _unmoved(other.entry)], PLAN, "backbone", keep)


def test_each_task_keeps_as_many_ways_back(tmp_path: Path) -> None:
    _save_in_turns(tmp_path, keep=2)
    kept = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/checkpoint-*"))
    assert kept == ["a/checkpoint-3", "a/checkpoint-4", "b/checkpoint-1", "b/checkpoint-2"]
    numbers = [number for number, _ in sorted(saved_files.manifests(tmp_path))]
    assert numbers == [1, 4, 5], "the first names what b can go back to"


def test_a_task_whose_checkpoint_is_damaged_goes_back_alone(tmp_path: Path) -> None:
    _save_in_turns(tmp_path, keep=2)
    (tmp_path / "b/checkpoint-2/training_state.safetensors").write_bytes(b"")
    said: list[str] = []
    manifest = checkpoint.load(tmp_path, "backbone", said.append)
    assert manifest is not None and manifest.number == 5
    assert [(task.name, task.step) for task in manifest.tasks] == [("a", 4), ("b", 1)]
    (line,) = said
    assert "b goes back to save 1, since manifest-00000005.json names b/checkpoint-2/training_state" in line
    (tmp_path / "b/checkpoint-1/adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"cannot be continued: manifest-00000005\.json names b/checkpoint-2"):
        checkpoint.load(tmp_path, "backbone")


def test_steps_that_are_done_again_are_written_again(tmp_path: Path) -> None:
    """Those of another timeline are named by a save that is passed over."""
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    checkpoint.save(tmp_path, [_state(2, value=2.0)], PLAN, "backbone")
    checkpoint.save(tmp_path, [_state(2, value=3.0)], PLAN, "backbone")
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None
    assert (checkpoint.load_task(tmp_path, manifest.tasks[0]).adapter["k.lora_A.weight"] == 3.0).all()
    assert not list(tmp_path.rglob(".old-*")) and not list(tmp_path.rglob(".partial-*"))


def test_a_directory_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "file").write_text("old")
    with pytest.raises(FileNotFoundError):
        files.replace_directory(tmp_path / "partial", tmp_path / "final")
    assert (tmp_path / "final" / "file").read_text() == "old"
