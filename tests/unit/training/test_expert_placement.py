"""Which ranks or managers hold which experts: by default, by a file, with limited room, and when some are gone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_mux.arguments import parse_args
from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info
from megatron_mux.errors import UserError
from megatron_mux.moe.profile_tasks import identity
from megatron_mux.training.expert_placement import (
    PLACEMENT_FILE,
    expert_placement,
    kept_placement,
    placement_on_managers,
)
from megatron_mux.training.expert_topology import check_topology
from tests import tiny_models

FILE = [[[2], [0], [2], [1], [2]], *[[[0], [1], [2], [0], [0]]] * 3]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> BackboneInfo:
    """A Mixtral of 4 layers with 5 experts each."""
    return read_backbone_info(tiny_models.make(tmp_path_factory.mktemp("placed"), "mixtral"))


@pytest.fixture
def write(info: BackboneInfo, tmp_path: Path) -> Callable[..., Path]:
    def made(placement: list[Any], workers: int = 3, **more: Any) -> Path:
        file = tmp_path / PLACEMENT_FILE
        content = {"model": identity(info).model_dump(), "workers": workers, "placement": placement, **more}
        file.write_text(json.dumps(content))
        return file

    return made


def test_one_after_the_other(info: BackboneInfo) -> None:
    placement, log_lines = placement_on_managers(None, (), info, 3, False)
    assert placement.size == 4
    assert all(ranks == ((1,), (2,), (3,), (1,), (2,)) for ranks in placement.ranks.values())
    assert log_lines == ["3 expert managers hold 8, 8, 4 of the backbone's 20 experts"]


def test_room_is_respected(info: BackboneInfo) -> None:
    placement, log_lines = placement_on_managers(None, (2, 6, 12), info, 3, False)
    counts = Counter(rank for ranks in placement.ranks.values() for (rank,) in ranks)
    assert counts == {1: 2, 2: 6, 3: 12}
    assert log_lines == ["3 expert managers hold 2, 6, 12 of the backbone's 20 experts"]


def test_only_experts_of_managers_that_are_gone_move(info: BackboneInfo, write: Callable[..., Path]) -> None:
    file = write(FILE)
    placement, log_lines = placement_on_managers(file, (10,), info, 2, True)
    for layer, row in enumerate(FILE):
        for expert, (before,) in enumerate(row):
            if before < 2:
                assert placement.ranks[layer][expert] == (before + 1,)
    assert log_lines[0].endswith(
        "expert managers there are 2: of the experts of those that are gone, 6 to manager 2"
    )
    assert log_lines[1] == "2 expert managers hold 10, 10 of the backbone's 20 experts"


def test_numbers_for_more_managers_are_those_of_the_first(
    info: BackboneInfo, write: Callable[..., Path]
) -> None:
    placement, log_lines = placement_on_managers(write(FILE), (12, 9, 9), info, 2, True)
    assert log_lines[0].startswith("--mux-expert-capacity 12,9,9: is for 3 expert managers, and there are 2")
    counts = Counter(rank for ranks in placement.ranks.values() for (rank,) in ranks)
    assert counts[1] <= 12 and counts[2] <= 9 and counts.total() == 20


def test_a_kept_placement_gives_way_to_new_capacities(info: BackboneInfo, write: Callable[..., Path]) -> None:
    """One that a user gives does not."""
    file = write(FILE)
    with pytest.raises(UserError, match="its capacity is"):
        placement_on_managers(file, (4, 10, 10), info, 3, True)
    placement, log_lines = placement_on_managers(file, (4, 10, 10), info, 3, True, kept=True)
    assert (
        log_lines[0]
        == f"{file}: some experts no longer fit where it has them, and go where there is most room"
    )
    counts = Counter(rank for ranks in placement.ranks.values() for (rank,) in ranks)
    assert counts[1] == 4 and counts.total() == 20
    assert len(placement_on_managers(file, (), info, 3, True, kept=True)[1]) == 1, "nothing to say of it"


def topology_file(directory: Path, *capacities: int) -> Path:
    workers = [{"node": "abc"[n], "capacity": capacity} for n, capacity in enumerate(capacities)]
    matrix = [[0.0 if i == j else 10.0 * i + j + 1 for j in range(len(workers))] for i in range(len(workers))]
    matrix[0][0] = 5.0  # between the master and the worker beside it
    uplinks = {worker["node"]: {"up": 1.0, "down": 1.0} for worker in workers}
    content = {"workers": workers, "bandwidth": matrix, "master_node": "a", "uplinks": uplinks}
    file = directory / "topology.json"
    file.write_text(json.dumps(content))
    return file


def arguments_of(directory: Path, *words: str | Path) -> Any:
    (directory / "tasks.yaml").write_text("tasks: []")
    usual = ("--backbone", directory, "--mux-tasks", directory / "tasks.yaml", "--load", directory)
    return parse_args([str(word) for word in (*usual, *words)])


AUTO = ("--mux-expert-placement", "auto")


def test_fewer_managers_take_their_part_of_a_topology(info: BackboneInfo, tmp_path: Path) -> None:
    file = topology_file(tmp_path, 12, 9, 9)
    words = (*AUTO, "--mux-expert-topology", file, "--mux-expert-managers", "2")
    experts = info.shape.experts
    assert experts is not None
    found, said = check_topology(arguments_of(tmp_path, *words), experts, 4, continued=True)
    assert found is not None and found.capacities.tolist() == [12, 9]
    assert "has 3 workers, and expert managers there are 2: its first 2 count" in said
    whole, _ = check_topology(arguments_of(tmp_path, *words[:-1], "3"), experts, 4, continued=True)
    assert whole is not None and found.from_master().tolist() == whole.from_master()[:2].tolist()
    assert (found.between_workers() == whole.between_workers()[:2, :2]).all() and set(found.uplinks) == {
        "a",
        "b",
    }
    for more, complaint in (
        ((*words, "--mux-expert-capacity", "9"), "contradicts the capacities"),
        (words, "has 3 entries, but there are 2 expert managers"),
    ):
        with pytest.raises(UserError, match=complaint):
            check_topology(arguments_of(tmp_path, *more), experts, 4, continued=more != words)
    topology_file(tmp_path, 12, 5, 9)
    with pytest.raises(UserError, match="workers: have a capacity of 17 experts together"):
        check_topology(arguments_of(tmp_path, *words), experts, 4, continued=True)


def test_room_binds_expert_ranks_before_they_are_placed(
    info: BackboneInfo, write: Callable[..., Path]
) -> None:
    """By default neighbours go where a topology has room for them; a file that exceeds it fails."""
    assert expert_placement(None, info, 3, np.array([8, 8, 4])) is None
    placement = expert_placement(None, info, 3, np.array([4, 12, 6]))
    assert placement is not None and all(len(ranks) == 1 for row in placement.ranks.values() for ranks in row)
    assert [placement.held_by(rank) <= room for rank, room in enumerate((4, 12, 6))] == [True] * 3
    with pytest.raises(UserError, match="placement: worker 0 holds 10 experts, but its capacity is 9"):
        expert_placement(write(FILE), info, 3, np.array([9, 9, 9]))


@pytest.mark.parametrize(
    ("kind", "workers", "mode", "complaint"),
    [
        ("expert managers", 3, ("--mux-expert-managers", "3"), ""),
        (None, 3, ("--mux-expert-managers", "3"), ""),
        ("expert managers", 3, ("--mux-expert-managers", "2"), ""),
        ("expert ranks", 3, ("--expert-model-parallel-size", "3"), ""),
        ("expert managers", 3, ("--expert-model-parallel-size", "3"), "3 expert managers, .* 3 expert ranks"),
        (
            "expert ranks",
            3,
            ("--mux-expert-managers", "2"),
            "3 expert ranks, but this run has 2 expert managers",
        ),
        ("expert ranks", 3, ("--expert-model-parallel-size", "2"), "3 expert ranks, .* 2 expert ranks"),
    ],
)
def test_a_kept_placement_is_for_the_workers_it_names(
    kind: str | None, workers: int, mode: tuple[str, str], complaint: str, info: BackboneInfo, write: Any
) -> None:
    file = write(FILE, workers, **({} if kind is None else {"workers_are": kind}))
    found, said = kept_placement(arguments_of(file.parent, *AUTO, *mode), info, True)
    assert found == (None if complaint else file)
    assert re.search(complaint + ": experts are placed anew" if complaint else "experts are where", said), (
        said
    )


def test_a_kept_placement_fits_or_does_not_count(info: BackboneInfo, write: Callable[..., Path]) -> None:
    arguments = arguments_of(write(FILE).parent, *AUTO, "--expert-model-parallel-size", "3")
    assert kept_placement(arguments, info, True, np.array([10, 9, 9]))[0] is not None
    found, said = kept_placement(arguments, info, True, np.array([9, 9, 9]))
    assert found is None and "does not fit the capacities" in said
    other = write(FILE, workers_are="expert managers")
    with pytest.raises(UserError, match="workers_are: is for expert managers, but this run has expert ranks"):
        expert_placement(other, info, 3)


@pytest.mark.parametrize(
    ("placement", "capacity", "managers", "continued", "complaint"),
    [
        (None, (9,), 2, True, "2 expert managers have room for 18 experts, but the backbone has .* = 20"),
        (None, (9,), 1, False, "expert manager has room for 9 experts"),
        (None, (9, 9, 9), 2, False, "is for 3 expert managers, but there are 2"),
        (FILE, (), 2, False, "is for 3 workers, but there are 2"),
        (FILE, (), 4, True, "is for 3 workers, but there are 4"),
        (FILE, (9, 9, 5), 3, False, "worker 0 holds 10 experts, but its capacity is 9"),
        ([[[0, 1], [0], [1], [1], [0]]] * 4, (), 3, False, "replicas are not allowed here"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    placement: Any,
    capacity: tuple[int, ...],
    managers: int,
    continued: bool,
    complaint: str,
    info: BackboneInfo,
    write: Callable[..., Path],
) -> None:
    file = None if placement is None else write(placement)
    with pytest.raises(UserError, match=complaint):
        placement_on_managers(file, capacity, info, managers, continued)


def test_a_backbone_without_experts_is_refused(tmp_path: Path) -> None:
    info = read_backbone_info(tiny_models.make(tmp_path, "llama"))
    with pytest.raises(UserError, match="a llama has no experts"):
        placement_on_managers(None, (), info, 2, False)
