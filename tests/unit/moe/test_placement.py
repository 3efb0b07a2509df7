"""Placement files: written, read again, and refused by the name of the entry."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_mux.errors import UserError
from megatron_mux.expert_shape import serving_rank
from megatron_mux.moe.access_profile import ModelIdentity
from megatron_mux.moe.placement import (
    Solution,
    from_owners,
    has_replicas,
    read_placement,
    to_owners,
    write_placement,
)

MODEL = ModelIdentity(family="mixtral", layers=2, experts=3, top_k=2, fingerprint="f00d")


def test_a_placement_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    owners = np.array([[0, 1, 2], [2, 1, 0]])
    write_placement(path, MODEL, 3, from_owners(owners), {"objective_s": 1.5})
    found = read_placement(path, MODEL, 3, np.array([2, 2, 2]), replicas=False).placement
    assert np.array_equal(to_owners(found), owners)
    assert json.loads(path.read_text())["objective_s"] == 1.5
    assert [file.name for file in tmp_path.iterdir()] == ["placement.json"]


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ([[[0], [1], [2]], [[0], [], [2]]], "placement[1][1]: leaves the expert out"),
        ([[[0], [1], [2]], [[0], [0, 1], [2]]], "placement[1][1]: places the expert 2 times, but replicas"),
        ([[[0], [1], [2]], [[0], [1, 1], [2]]], "placement[1][1]: names a worker twice: [1, 1]"),
        ([[[0], [1], [3]], [[0], [1], [2]]], "placement[0][2]: worker 3 does not exist: workers are 0 to 2"),
        ([[[0], [1], [-1]], [[0], [1], [2]]], "placement[0][2]: worker -1 does not exist"),
        ([[[0], [0], [2]], [[0], [1], [2]]], "placement: worker 0 holds 3 experts, but its capacity is 2"),
        ([[[0], [1], [2]]], "placement: has 1 layers, but the model has 2"),
        ([[[0], [1], [2]], [[0], [1]]], "placement[1]: has 2 experts, but the model has 3"),
        ([[[0], [1], [2]], [[0], [1.0], [2]]], "placement[1][1][0]: "),
        ([[[0], 1, [2]], [[0], [1], [2]]], "placement[0][1]: "),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, placement: Any, said: str) -> None:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"model": MODEL.model_dump(), "workers": 3, "placement": placement}))
    with pytest.raises(UserError) as caught:
        read_placement(path, MODEL, 3, np.array([2, 2, 2]), replicas=False)
    assert str(caught.value).startswith(f"{path}: {said}")


def test_another_model_or_number_of_workers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    write_placement(path, MODEL, 3, from_owners(np.zeros((2, 3), dtype=np.int64)), {})
    with pytest.raises(UserError, match="is for another model: fingerprint 'f00d' instead of 'cafe'"):
        read_placement(path, MODEL.model_copy(update={"fingerprint": "cafe"}))
    with pytest.raises(UserError, match="is for 3 workers, but there are 4"):
        read_placement(path, MODEL, 4)


def test_replicas_are_allowed_where_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    write_placement(path, MODEL, 3, (((0,), (0, 1), (2,)),) * 2, {})
    assert has_replicas(read_placement(path, MODEL, capacities=np.array([4, 2, 2])).placement)


def test_the_nearest_replica_serves() -> None:
    nodes = ["a", "a", "b", "b"]
    assert serving_rank([3], 0, "a", nodes) == 3
    assert serving_rank([0, 1, 2], 1, "a", nodes) == 1  # itself
    assert serving_rank([1, 2], 0, "a", nodes) == 1  # on its node
    assert [serving_rank([0, 1], sender, "b", nodes) for sender in (2, 3)] == [0, 1]  # divided
    assert serving_rank([0, 1], None, "b", nodes) == 0  # the master is none of the workers


def test_the_gap_is_relative_to_the_bound() -> None:
    def gap(objective: float, bound: float) -> float:
        return Solution((), objective, bound, 0.0, "auto").gap

    assert gap(1.5, 1.0) == 0.5
    assert gap(1.0, 1.0) == gap(0.0, 0.0) == gap(1.0, 1.0 + 1e-16) == 0.0
    assert gap(1.0, 0.0) == math.inf
