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


def test_vs_peft_in_bf16_against_one_rival_with_the_memory_of_many_tasks(
    tmp_path: Path, server: Server
) -> None:
    command = [server.python, "benchmarks/vs_peft.py", "--backbone-shape", "tiny", "--replicas", "6"]
    command += ["--threads", "1", "--repeats", "1", "--steps", "1", "--warm-up", "1"]
    command += ["--dtype", "bfloat16", "--rival", "packed", "--output", str(tmp_path / "result.json")]
    result = result_of(command, tmp_path)
    assert result["settings"]["dtype"] == "bfloat16"
    for part in ("all", "short"):
        (rival,) = result[part]["rivals"].values()
        assert rival["largest_relative_loss_difference"] < 0.02
    memory = result["memory"]
    assert set(memory) == {"mux:mix", "mux:one", "mux:eight", "mux:6", "packed:0", "packed:2", "packed:3"}
    assert memory["packed:0"]["tasks_of_this_kind"] == 2
    assert memory["mux:one"]["persistent"] < memory["mux:6"]["persistent"] < memory["mux:eight"]["persistent"]
    assert "6 tasks together (the mix repeated) peak at" in (tmp_path / "result.md").read_text()


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


def test_messages_on_several_gpus_without_one(tmp_path: Path, server: Server) -> None:
    command = [server.python, "benchmarks/communication_gpus.py", "--dry"]
    result = result_of([*command, "--output", str(tmp_path / "result.json")], tmp_path)
    assert [one["way"] for one in result["sweep"]] == ["gloo", "gloo"] and result["ranks"] == 2
    assert all(one["message_s"] > 0 and one["bus_bytes_per_s"] > 0 for one in result["sweep"])
    assert [one["order"] for one in result["steps"]] == ["one after another", "in turns"]
    for step in result["steps"]:
        assert 0 < step["compute"] <= 1 and 0 < step["links"] <= 1
        assert step["both"] <= min(step["compute"], step["links"])
    assert "the figures mean nothing" in (tmp_path / "result.md").read_text()


def test_overlap_comes_out_as_one_after_another(tmp_path: Path, server: Server) -> None:
    command = [server.python, "benchmarks/overlap.py", "--no-namespaces", "--backbone-shape", "tiny"]
    command += ["--tasks", "2", "--turns", "1", "--tokens", "128", "--output", str(tmp_path / "result.json")]
    (case,) = result_of(command, tmp_path)["cases"]
    assert case["adapters_equal"] and case["messages_equal"]
    assert case["messages"] > 0
    assert set("abcde") == set(case["predicted_s"])
    assert set("abcdefg") == set(case["seconds"])
    assert all(sorted(order) == list("0000011111") for order in case["orders"]["d"])
    assert "one batch split in two" in (tmp_path / "result.md").read_text()
