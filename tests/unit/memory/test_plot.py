"""Memory over time as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_mux.errors import UserError
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction
from megatron_mux.memory.plot import check, draw, series
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.stream.events import Category, Moment, StreamBuilder


def _prediction(times: int = 20) -> Prediction:
    builder = StreamBuilder()
    builder.allocate(4 * MIB, Moment("load"), category=Category.PARAMETERS)
    for _ in range(times):
        x = builder.allocate(2 * MIB, Moment("forward"), category=Category.ACTIVATIONS)
        builder.allocate(100, Moment("backward"), category=Category.GRADIENTS)
        builder.free(x, Moment("backward"))
    return Prediction(builder.done(), Settings(), 0)


def test_categories_add_up_to_what_is_live() -> None:
    found = _prediction()
    columns, reserved = series(found)
    assert list(columns) == ["parameters", "gradients", "activations"]
    assert [sum(sizes) for sizes in zip(*columns.values(), strict=True)] == list(found.stream.live())
    assert reserved == list(found.replay.reserved)


def test_the_peak_of_a_long_stream_is_drawn() -> None:
    found = _prediction(times=5000)
    columns, reserved = series(found)
    assert len(reserved) <= 4000
    assert max(sum(sizes) for sizes in zip(*columns.values(), strict=True)) == found.stream.peak().size


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"memory{suffix}"
    check(file)
    draw(_prediction(), "a model", file)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    if suffix == ".svg":
        assert b"reserved" in content or content.count(b"<path") > 10


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        check(tmp_path / "memory.pdf")
    with pytest.raises(UserError, match="no directory"):
        check(tmp_path / "nowhere" / "memory.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install"):
        check(tmp_path / "memory.svg")
