"""Which expert managers hold which experts: by default, by a file, with limited room, and when some are gone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info
from megatron_mux.errors import UserError
from megatron_mux.moe.profile_tasks import identity
from megatron_mux.training.expert_placement import placement_on_managers
from tests import tiny_models

FILE = [[[2], [0], [2], [1], [2]], *[[[0], [1], [2], [0], [0]]] * 3]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> BackboneInfo:
    """A Mixtral of 4 layers with 5 experts each."""
    return read_backbone_info(tiny_models.make(tmp_path_factory.mktemp("placed"), "mixtral"))


@pytest.fixture
def write(info: BackboneInfo, tmp_path: Path) -> Callable[..., Path]:
    def made(placement: list[Any], workers: int = 3) -> Path:
        file = tmp_path / "placement.json"
        content = {"model": identity(info).model_dump(), "workers": workers, "placement": placement}
        file.write_text(json.dumps(content))
        return file

    return made


def test_one_after_the_other(info: BackboneInfo) -> None:
    placement, news = placement_on_managers(None, (), info, 3, False)
    assert placement.size == 4
    assert all(ranks == ((1,), (2,), (3,), (1,), (2,)) for ranks in placement.ranks.values())
    assert news == ["3 expert managers hold 8, 8, 4 of the backbone's 20 experts"]


def test_room_is_respected(info: BackboneInfo) -> None:
    placement, news = placement_on_managers(None, (2, 6, 12), info, 3, False)
    counts = Counter(rank for ranks in placement.ranks.values() for (rank,) in ranks)
    assert counts == {1: 2, 2: 6, 3: 12}
    assert news == ["3 expert managers hold 2, 6, 12 of the backbone's 20 experts"]


def test_only_experts_of_managers_that_are_gone_move(info: BackboneInfo, write: Callable[..., Path]) -> None:
    file = write(FILE)
    placement, news = placement_on_managers(file, (10,), info, 2, True)
    for layer, row in enumerate(FILE):
        for expert, (before,) in enumerate(row):
            if before < 2:
                assert placement.ranks[layer][expert] == (before + 1,)
    assert news[0].endswith(
        "expert managers there are 2: of the experts of those that are gone, 6 to manager 2"
    )
    assert news[1] == "2 expert managers hold 10, 10 of the backbone's 20 experts"


@pytest.mark.parametrize(
    ("placement", "capacity", "managers", "continued", "complaint"),
    [
        (None, (9,), 2, True, "2 expert managers have room for 18 experts, but the backbone has .* = 20"),
        (None, (9,), 1, False, "expert manager has room for 9 experts"),
        (None, (9, 9, 9), 2, True, "is for 3 expert managers, but there are 2"),
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
