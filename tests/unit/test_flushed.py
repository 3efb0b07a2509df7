"""What a save leaves survives a power cut: content is on the disk before anything gets its final name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux import checkpoint
from megatron_mux.checkpoint import SavedTask, TaskToSave
from megatron_mux.engine import Snapshot
from megatron_mux.fusion.plan import plan_for


def test_content_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[int] = set()  # inodes
    renamed: list[Path] = []
    unseen: set[Path] = set()  # directories with a new name that is not on the disk yet
    flush = os.fsync

    def fsync(handle: int) -> None:
        flush(handle)
        flushed.add(os.fstat(handle).st_ino)
        unseen.difference_update([path for path in unseen if os.path.samestat(path.stat(), os.fstat(handle))])

    def checked(rename: Callable[..., None]) -> Callable[..., None]:
        def run(source: Path, target: Path, **options: Any) -> None:
            for path in (source, *source.rglob("*")):
                assert path.stat().st_ino in flushed, f"{path.relative_to(tmp_path)} is renamed unflushed"
            rename(source, target, **options)
            renamed.append(target)
            unseen.add(target.parent)

        return run

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, checked(getattr(os, name)))
    tensors = {"k.lora_A.weight": torch.ones(2, 3)}
    snapshot = Snapshot(1, tensors, {key: {"exp_avg": value} for key, value in tensors.items()})
    entry = SavedTask("a", 1, "running", "", "", {"name": "a"}, "data")
    state = TaskToSave(entry, snapshot, {"peft_type": "LORA"})
    checkpoint.save(tmp_path, [state], plan_for("spatial", {"a": 1}, 1), "backbone")
    assert tmp_path / "a/checkpoint-1" in renamed and len(renamed) == 3  # and the manifest, and the plan
    assert not unseen
