"""Metrics of a run that is continued hold each step once."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.report import cut_metrics


def test_metrics_beyond_the_save_are_cut(tmp_path: Path) -> None:
    manifest = Manifest(1, "backbone", [SavedTask("a", 2, "running", "", "a/checkpoint-2", {}, "data")], {})
    path = tmp_path / "a" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"step": i}) + "\n" for i in (0, 1, 2, 3)) + '{"step": 4, "lo')
    cut_metrics(tmp_path, manifest)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]
