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
    command += ["--output", str(directory / "result.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_MUX_CACHE": str(directory)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((directory / "result.json").read_text())


@pytest.mark.parametrize(
    ("dtype", "rivals", "bound"), [("float32", ["padded", "packed"], 1e-5), ("bfloat16", ["packed"], 0.02)]
)
def test_vs_peft_on_a_tiny_backbone(
    dtype: str, rivals: list[str], bound: float, tmp_path: Path, server: Server
) -> None:
    command = [server.python, "benchmarks/vs_peft.py", "--backbone-shape", "tiny", "--threads", "1"]
    command += ["--repeats", "1", "--steps", "2", "--warm-up", "1", "--dtype", dtype]
    command += ["--rival", "packed"] if len(rivals) == 1 else ["--skip-memory"]
    result = result_of(command, tmp_path)
    for part, tasks in (("all", 4), ("short", 2)):
        found = result[part]
        assert len(found["tasks"]) == tasks
        assert list(found["rivals"]) == rivals
        for rival in found["rivals"].values():
            assert rival["largest_relative_loss_difference"] < bound
        for side in (*rivals, "mux"):
            assert all(len(losses) == 3 for losses in found["losses"][side].values())
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found["seconds_of_turns"].values())
    written = (tmp_path / "result.md").read_text()
    assert "its short tasks (2)" in written
    if memory := result["memory"]:
        assert set(memory) == {"mux:mix", "mux:one", "mux:eight", "packed:0", "packed:2", "packed:3"}
        assert memory["packed:0"]["tasks_of_this_kind"] == 2
        assert memory["mux:one"]["persistent"] < memory["mux:eight"]["persistent"]
        assert "persistent, megatron-mux, 8 tasks" in written


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
    result = result_of([*command, "--steps", "1", "--cases", "1", "3"], tmp_path)
    assert [case["records"] for case in result["cases"]] == ["same shapes", "padded"]
    for case in result["cases"]:
        assert case["largest_loss_difference"] < 1e-5
        assert set(case["seconds"]) == {"megatron", "spatial", "temporal", "auto"}
        assert all(len(own) == 1 and own[0] > 0 for own in case["seconds"].values())
        assert all(0 <= share < 1 for shares in case["bubble"].values() for share in shares)
    assert "over Megatron-Core's 1F1B" in (tmp_path / "result.md").read_text()
