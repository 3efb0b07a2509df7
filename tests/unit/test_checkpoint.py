"""Saves are atomic: whatever fails, the newest manifest names complete checkpoints."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mux import checkpoint
from megatron_mux.checkpoint import SavedTask, TaskState
from megatron_mux.engine import Snapshot
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import plan_for

PLAN = plan_for("spatial", {"a": 1}, 1)


def _state(step: int, name: str = "a", value: float = 0.0) -> TaskState:
    snapshot = Snapshot(
        step,
        adapter={"k.lora_A.weight": torch.full((2, 3), value)},
        moments={"k.lora_A.weight": {"exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.zeros(2, 3)}},
        extra={"k.lora_A.weight": torch.arange(3)},
    )
    return TaskState(
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
    real = checkpoint._write
    for failing in range(3):
        calls = 0

        def full(path: Path, content: bytes, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls > failing:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            real(path, content)

        monkeypatch.setattr(checkpoint, "_write", full)
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


def test_a_broken_newest_manifest_falls_back_to_the_one_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    (tmp_path / "manifests" / "manifest-00000009.json").write_text("{")
    manifest = checkpoint.load(tmp_path, "backbone")
    assert manifest is not None and manifest.number == 1
    assert checkpoint.save(tmp_path, [_state(2)], PLAN, "backbone").number == 10


def test_another_backbone_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    with pytest.raises(UserError, match="another backbone"):
        checkpoint.load(tmp_path, "other")


def test_saving_onto_a_run_is_refused_and_an_empty_directory_is_not(tmp_path: Path) -> None:
    checkpoint.refuse_used(tmp_path / "missing")
    checkpoint.refuse_used(tmp_path)
    checkpoint.save(tmp_path, [_state(1)], PLAN, "backbone")
    with pytest.raises(UserError, match="holds checkpoints of a run already"):
        checkpoint.refuse_used(tmp_path)


def test_keeping_few_prunes_old_checkpoints_but_not_named_ones(tmp_path: Path) -> None:
    done = checkpoint.save(tmp_path, [_state(5, "done")], PLAN, "backbone").tasks[0]
    for step in (1, 2, 3):
        states = [TaskState(replace(done)), _state(step)]
        checkpoint.save(tmp_path, states, PLAN, "backbone", keep=1)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["checkpoint-3"]
    assert (tmp_path / "done" / "checkpoint-5").is_dir()
    assert len(list((tmp_path / "manifests").iterdir())) == 1


def test_metrics_beyond_the_save_are_cut(tmp_path: Path) -> None:
    manifest = checkpoint.save(tmp_path, [_state(2)], PLAN, "backbone")
    path = tmp_path / "a" / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i}) + "\n" for i in (0, 1, 2, 3)) + '{"step": 4, "lo')
    checkpoint.cut_metrics(tmp_path, manifest)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_an_unreadable_checkpoint_is_named(tmp_path: Path) -> None:
    manifest = checkpoint.save(tmp_path, [_state(2)], PLAN, "backbone")
    (tmp_path / "a/checkpoint-2/adapter_model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match=r"checkpoint-2.*cannot be read"):
        checkpoint.load_task(tmp_path, manifest.tasks[0])
