"""Memory over time as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_mux.errors import UserError
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction, process_overhead
from megatron_mux.memory.plot import Panel, check, closed, draw, traced
from megatron_mux.memory.sizes import GIB, MIB
from megatron_mux.memory.stream.events import Category, Moment, StreamBuilder
from tests.unit.memory.stream.peak import peak_of

INSTANTS = {
    "the loss": {"parameters": 2 * GIB, "activations": 3 * GIB},
    "the optimizer's step": {"parameters": 2 * GIB, "gradients": GIB},
}


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
    panel = traced(found, "a step")
    assert list(panel.columns) == ["context", "parameters", "gradients", "activations"]
    assert panel.totals == [process_overhead(0) + size for size in found.stream.live()]
    assert panel.reserved == [process_overhead(0) + size for size in found.replay.reserved]
    assert panel.top == found.process


def test_the_peak_of_a_long_stream_is_drawn() -> None:
    found = _prediction(times=5000)
    panel = traced(found, "a step")
    assert len(panel.reserved) <= 4000
    assert max(panel.totals) == peak_of(found.stream).size + process_overhead(0)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_picture(tmp_path: Path, suffix: str, count: int) -> None:
    file = tmp_path / f"memory{suffix}"
    check(file)
    panels = [traced(_prediction(), "a step"), *(closed(f"{n} TP", INSTANTS) for n in range(count - 1))]
    draw(panels, "a model", 6 * GIB, file)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        check(tmp_path / "memory.pdf")
    with pytest.raises(UserError, match="no directory"):
        check(tmp_path / "nowhere" / "memory.svg")
    panel = Panel("one", ("now",), {"parameters": [GIB]})
    (tmp_path / "taken.svg").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        draw([panel], "a model", GIB, tmp_path / "taken.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install"):
        check(tmp_path / "memory.svg")


def test_what_is_in_a_picture(tmp_path: Path) -> None:
    import matplotlib

    file = tmp_path / "memory.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters, not their outlines
        draw([closed("4 TP", INSTANTS), closed("4 DP", INSTANTS)], "a model", 6 * GIB, file)
        text = file.read_text()
        for word in (
            "a model",
            "4 TP",
            "4 DP",
            "5.0 GiB",
            "parameters",
            ">GPU<",
            "optimizer",
        ):
            assert word in text, word
        draw([closed("4 TP", INSTANTS)], "a model", 600 * GIB, file)
        text = file.read_text()
        assert "a GPU has 600" in text and ">GPU<" not in text, "far above what is drawn"
