"""Fixtures of tests directly in this directory."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a backbone and tasks."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tasks.yaml").write_text("tasks: []")
    monkeypatch.chdir(tmp_path)
    return tmp_path
