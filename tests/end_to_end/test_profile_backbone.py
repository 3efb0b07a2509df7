"""The tool measures backbones with experts as a run divides them, and finds what it has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_mux.backbone.registry import read_shape
from megatron_mux.fusion.profiler.profile_store import about_run, find_profile
from tests import tiny_models
from tests.end_to_end.forked import Server
from tests.end_to_end.ranks import run_tool


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2"])
def test_a_profile_of_expert_ranks_is_found(name: str, server: Server, tmp_path: Path) -> None:
    path, cache = tiny_models.make(tmp_path, name), tmp_path / "profiles"
    words = ["--backbone", path, "--fp32", "--most-tokens", "32", "--rounds", "1", "--directory", cache]
    statuses, errors = run_tool(server, "profile_backbone", [*words, "--expert-model-parallel-size", "2"], 2)
    assert statuses == [0, 0], errors

    (file,) = cache.iterdir()
    about = json.loads(file.read_text())["about"]
    assert about["busy"] == 2 and about["expert_parallel"] == 2

    def found(ranks: int) -> str:
        shape = read_shape(path)
        asked = about_run(shape, "cpu", torch.float32, 1, about["threads"], busy=2, expert_parallel=ranks)
        return find_profile(shape, asked, cache).source

    assert found(2) == "measured"
    assert found(1) == "roofline", "that of undivided experts is another one"


def test_divisions_that_cannot_be_are_refused(server: Server, tmp_path: Path) -> None:
    words = ["--backbone", tiny_models.make(tmp_path, "mixtral"), "--fp32", "--directory", tmp_path]
    for more, said in (
        (["--tensor-model-parallel-size", "2"], "a backbone with experts needs --sequence-parallel"),
        (["--expert-model-parallel-size", "6"], "its 5 experts cannot fill 6 expert ranks"),
    ):
        statuses, errors = run_tool(server, "profile_backbone", [*words, *more], 2)
        assert statuses == [2, 2] and said in errors, errors
