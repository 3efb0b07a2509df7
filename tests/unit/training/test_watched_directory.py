"""The watched directory reports what came and what went, once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_mux.training.watched_directory import STOP, WatchedDirectory

ALONE: Any = SimpleNamespace(world_size=1, rank=0)


def test_files_come_and_go_once(tmp_path: Path) -> None:
    watched = WatchedDirectory(tmp_path, ALONE)
    assert watched.look().added == ()
    first = tmp_path / "first.yaml"
    first.write_text("name: a")
    (tmp_path / ".hidden.yaml").write_text("being written")
    (tmp_path / "notes.txt").write_text("not a task")
    assert watched.look().added == (first,)
    assert watched.look().added == ()
    first.write_text("name: another")
    assert watched.look().added == (first,), "a corrected file is looked at again"
    first.rename(tmp_path / "elsewhere.txt")
    changes = watched.look()
    assert changes.removed == (first,) and changes.added == ()
    assert not changes.stop


def test_stop_file(tmp_path: Path) -> None:
    watched = WatchedDirectory(tmp_path, ALONE)
    (tmp_path / STOP).touch()
    assert watched.look().stop


def test_a_directory_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    watched = WatchedDirectory(folder, ALONE)
    (folder / "a.yaml").write_text("name: a")
    watched.look()
    folder.rename(tmp_path / "away")
    assert watched.look().removed == ()
