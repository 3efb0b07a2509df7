"""Curves interpolate, profiles survive their files, and their names tell apart all that they depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux import runtime
from megatron_mux.errors import UserError
from megatron_mux.fusion.profiler.profile import FORMAT, Curve, key_of, points
from megatron_mux.fusion.profiler.profile_store import about_run, find_profile, load_profile, save_profile
from tests.unit.fusion import backbone

seconds = st.floats(0, 10)


def test_a_curve_is_linear_between_its_points() -> None:
    curve = Curve((10, 20, 40), (1.0, 3.0, 4.0), (2.0, 2.0, 6.0))
    assert curve.at(15) == (2.0, 2.0)
    assert curve.at(30) == (3.5, 4.0)
    assert curve.at(5) == (1.0, 2.0), "as little as the least that was measured"
    assert curve.at(60) == (5.0, 10.0), "on the last slope"
    assert Curve((10, 20), (5.0, 1.0), (1.0, 1.0)).at(1000)[0] == 0.0, "never less than nothing"


@given(st.dictionaries(st.integers(1, 5000), st.tuples(seconds, seconds), min_size=1, max_size=8))
def test_a_curve_goes_through_its_points(known: dict[float, tuple[float, float]]) -> None:
    curve = points(known)
    for size, value in known.items():
        assert curve.at(size) == pytest.approx(value)


@pytest.mark.parametrize(
    "wrong", [((), (), ()), ((1.0, 2.0), (1.0,), (1.0, 2.0)), ((2.0, 1.0), (1.0, 1.0), (1.0, 1.0))]
)
def test_a_wrong_curve_is_refused(wrong: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="a curve"):
        Curve(*wrong)


def test_a_profile_is_found_under_what_it_depends_on(tmp_path: Path) -> None:
    about = about_run(backbone.shape(), "cpu", "torch.float32", 1, threads=2)
    profile = backbone.profile(about=about, source="measured")
    path = save_profile(profile, tmp_path / "profiles")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert load_profile(about, path.parent) == profile
    others = [
        about_run(backbone.shape(), "cpu", "torch.float32", 2, threads=2),
        about_run(backbone.shape(), "cpu", "torch.bfloat16", 1, threads=2),
        about_run(backbone.shape(), "cpu", "torch.float32", 1, threads=1),
        about_run(backbone.shape(), "cpu", "torch.float32", 1, threads=2, busy=2),
        about_run(backbone.shape(layers=9), "cpu", "torch.float32", 1, threads=2),
        about_run(backbone.shape(), "H100", "torch.float32", 1),
        {**about, "torch": "0"},
    ]
    assert len({key_of(other) for other in [about, *others]}) == 1 + len(others)
    assert all(load_profile(other, path.parent) is None for other in others)


def test_a_profile_in_tf32_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TF32 a profile's name says nothing of it: those measured before keep theirs."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def about(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return about_run(backbone.shape(), "cuda", dtype, 1)

    plain, half = about(), about(torch.bfloat16)
    runtime.use_tf32()
    try:
        assert about() == {**plain, "tf32": True} and key_of(about()) != key_of(plain)
        assert "tf32" not in plain and about(torch.bfloat16) == half
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_a_profile_of_other_company_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run looks for the profile of as many busy processes as it has on a host, then for the nearest number."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    said: list[str] = []

    def found(kind: str = "cpu") -> int:
        about = about_run(backbone.shape(), kind, torch.float32, 1, threads=1)
        profile = find_profile(backbone.shape(), about, tmp_path, said.append)
        return int(profile.about.get("busy", 0))

    def keep(busy: int) -> None:
        about = about_run(backbone.shape(), "cpu", torch.float32, 1, threads=1, busy=busy)
        save_profile(backbone.profile(about=about, source="measured"), tmp_path)

    assert found() == 3 and not said, "none is there: a roofline of what was asked for"
    for busy in (1, 4, 3):
        keep(busy)
        assert found() == busy
    assert len(said) == 2 and "3 process(es) busy" in said[0] and "with 1" in said[0]
    assert found("H100") == 0, "a GPU belongs to one process"


def test_a_damaged_profile_is_named(tmp_path: Path) -> None:
    about = {"device": "x"}
    (tmp_path / f"{key_of(about)}.json").write_text('{"curves": {')
    with pytest.raises(UserError, match=r"is no profile: delete it, or measure anew"):
        load_profile(about, tmp_path)


def test_a_profile_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """It has another name; whoever looks for the new one is told. With the new one's name it is none."""
    about = about_run(backbone.shape(), "cpu", "torch.float32", 1, threads=1, busy=1)
    path = save_profile(backbone.profile(about=about, source="measured"), tmp_path)
    old = path.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT - 1}')
    path.write_text(old)
    with pytest.raises(UserError, match="is no profile"):
        load_profile(about, tmp_path)
    path.rename(tmp_path / f"{key_of(about, FORMAT - 1)}.json")
    said: list[str] = []
    found = find_profile(backbone.shape(), about, tmp_path, said.append)
    assert found.source == "roofline"
    assert len(said) == 1 and "of an earlier version" in said[0] and "megatron-mux profile" in said[0]


def test_a_stand_in_of_an_earlier_version_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however many there are: with other numbers of busy processes they would have stood in."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for busy in (2, 3):
        about = about_run(backbone.shape(), "cpu", "torch.float32", 1, threads=1, busy=busy)
        (tmp_path / f"{key_of(about, FORMAT - 1)}.json").write_text("{}")
    said: list[str] = []
    asked = about_run(backbone.shape(), "cpu", torch.float32, 1, threads=1, busy=1)
    found = find_profile(backbone.shape(), asked, tmp_path, said.append)
    assert found.source == "roofline" and len(said) == 1 and "of an earlier version" in said[0]


def test_a_profile_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save_profile(backbone.profile(), tmp_path / "file")
