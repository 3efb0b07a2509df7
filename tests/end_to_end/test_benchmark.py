"""The benchmarks' scripts run, and their sides train the same."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.registry import read_shape
from megatron_mux.fusion.profiler.profile_store import about_run, profile_directory, save_profile
from megatron_mux.fusion.profiler.roofline import roofline
from tests.end_to_end.forked import Server

ROOT = Path(__file__).resolve().parents[2]


def result_of(command: list[str], directory: Path) -> Any:
    """What a benchmark leaves, run from the command line; profiles are its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_MUX_CACHE": str(directory)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((directory / "result.json").read_text())


def test_vs_peft_on_a_tiny_backbone(tmp_path: Path, server: Server) -> None:
    command = [server.python, "benchmarks/vs_peft.py", "--backbone-shape", "tiny", "--skip-memory"]
    command += ["--threads", "1", "--repeats", "1", "--steps", "2", "--warm-up", "1", "--profile"]
    command += ["--zero-padded"]
    command += ["--output", str(tmp_path / "result.json")]
    result = result_of(command, tmp_path)
    for part, tasks in (("all", 4), ("short", 2)):
        found = result[part]
        assert len(found["tasks"]) == tasks
        assert set(found["rivals"]) == {"padded", "packed", "zero-padded"}
        for rival in found["rivals"].values():
            assert rival["largest_relative_loss_difference"] < 1e-5
        for side in ("padded", "packed", "zero-padded", "mux"):
            for losses in found["losses"][side].values():
                assert len(losses) == 3
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found["seconds_of_turns"].values())
    assert set(result["profile"]) == {"padded", "packed", "zero-padded", "mux", "ceiling"}
    assert all(kinds["matrix products"]["calls"] > 0 for kinds in result["profile"].values())
    written = (tmp_path / "result.md").read_text()
    assert "its short tasks (2)" in written and "megatron-mux: operators" in written


def keep_profile(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a roofline where two processes that keep their profiles in a directory find one: they measure nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("MEGATRON_MUX_CACHE", str(directory))
    from workload import write_random_backbone

    write_random_backbone("tiny", directory / "tiny", torch.float32)
    shape = read_shape(directory / "tiny")
    about = about_run(shape, "cpu", torch.float32, 1, threads=1, busy=2)
    save_profile(replace(roofline(shape, about, 4, 1), about=about), profile_directory())


def test_a_pipeline_against_megatron_on_a_tiny_backbone(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_profile(tmp_path, monkeypatch)
    command = [server.python, "benchmarks/pipeline.py", "--backbone-shape", "tiny", "--turns", "1"]
    command += ["--steps", "1", "--cases", "1", "3"]
    result = result_of([*command, "--output", str(tmp_path / "result.json")], tmp_path)
    assert [case["records"] for case in result["cases"]] == ["same shapes", "padded"]
    for case in result["cases"]:
        assert case["largest_loss_difference"] < 1e-5
        assert set(case["seconds"]) == {"megatron", "spatial", "temporal", "auto"}
        assert all(len(own) == 1 and own[0] > 0 for own in case["seconds"].values())
        assert all(0 <= share < 1 for shares in case["bubble"].values() for share in shares)
    assert "over Megatron-Core's 1F1B" in (tmp_path / "result.md").read_text()
