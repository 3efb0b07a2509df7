"""Layers of each stage: evenly, as Megatron's flags say, as its layout says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.backbone.split import even_split, parse_layout, split_between, stage_layers
from megatron_mux.errors import UserError


@given(st.integers(1, 200), st.data())
def test_an_even_split_has_every_layer_once(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    split = even_split(layers, stages)
    assert max(split) - min(split) <= 1 and list(split) == sorted(split, reverse=True)
    assert [i for own in stage_layers(split) for i in own] == list(range(layers))


def test_stages_share_thirty_layers() -> None:
    assert even_split(30, 4) == (8, 8, 7, 7)
    assert stage_layers((2, 3)) == [range(2), range(2, 5)]


def test_the_first_and_the_last_stage_take_what_they_are_told() -> None:
    assert split_between(30, 4, 9, 5) == (9, 8, 8, 5)
    assert split_between(30, 2, None, 10) == (20, 10)
    assert split_between(30, 2, 12, 18) == (12, 18)
    for first, last in ((29, None), (12, 17), (16, 16)):
        with pytest.raises(UserError, match="--decoder-first-pipeline-num-layers"):
            split_between(30, 4 if last is None else 2, first, last)


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("Et|tL", (1, 1)),
        ("Et*3|(t|)*4,t*2,L", (3, 1, 1, 1, 1, 2)),
        ("E(tt|)*2t*3L", (2, 2, 3)),
        ("E (t*2|)*3 t L", (2, 2, 2, 1)),
        ("EtL", (1,)),
    ],
)
def test_a_layout_is_read_as_megatron_reads_it(text: str, split: tuple[int, ...]) -> None:
    assert parse_layout(text) == split


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("E|t|tL", "stage 0 has no layer"),
        ("Et||tL", "stage 1 has no layer"),
        ("Et|tmL", "multi-token"),
        ("t|tL", "must be E"),
        ("Et|t", "must be E"),
        ("Et*|tL", "must be E"),
        ("E(t*99999|)*99999L", "repeats too much"),
        ("", "must be E"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse_layout(text)
