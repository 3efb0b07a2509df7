"""Measurements on a GPU in several sittings: order, limit of time, what is kept. Stubs stand in for the cases."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.gpus import Gpu
from tools import profile_backbone

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ran() -> list[str]:
    """Names of the cases that were run, in order."""
    return []


def sit(
    names: list[str],
    file: Path,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    *failing: str,
    again: bool = False,
) -> int:
    """One call of a minute, of cases that take 20 seconds and may take 25."""
    import gpu_hour
    from sitting import Kept, Sitting

    clock = Clock()

    def run(case: Any) -> dict[str, Any]:
        clock.now += 20
        ran.append(case.name)
        kept = json.loads(file.read_text())["cases"] if file.exists() else {}
        assert case.name not in kept or again
        return {"status": int(case.name in failing), "seconds": 20.0, "output": f"{case.name} said this"}

    monkeypatch.setattr(gpu_hour, "run", run)
    cases = [gpu_hour.Case(name, (), 25) for name in names]
    kept = Kept(file, {"versions": "1"}, {"cases": {}})
    status: int = gpu_hour.run_cases(cases, kept, Sitting(1, clock), again)
    return status


def test_a_call_goes_on_where_the_last_one_stopped(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, names = tmp_path / "check.json", list("abcde")
    assert sit(names, file, ran, monkeypatch) == 0
    assert ran == ["a", "b"], "a third one could end after 65 seconds"
    assert "3 of 5 left: run the same command again" in capsys.readouterr().err
    assert sit(names, file, ran, monkeypatch) == 0 and ran == ["a", "b", "c", "d"]
    capsys.readouterr()
    assert sit(names, file, ran, monkeypatch) == 0 and ran == names
    assert "left" not in capsys.readouterr().err
    assert sit(names, file, ran, monkeypatch) == 0 and ran == names, "nothing is left"
    assert list(json.loads(file.read_text())["cases"]) == names


def test_a_failed_case_is_told_each_time_and_run_again_on_request(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "check.json"
    assert sit(["a", "b"], file, ran, monkeypatch, "a") == 1 and ran == ["a", "b"]
    assert sit(["a", "b"], file, ran, monkeypatch) == 1 and ran == ["a", "b"]
    assert "a said this" in capsys.readouterr().out
    assert sit(["a", "b"], file, ran, monkeypatch, again=True) == 0 and ran == ["a", "b", "a"]


def test_results_of_something_else_are_refused_and_left_alone(tmp_path: Path) -> None:
    from sitting import Kept

    file = tmp_path / "results.json"
    first = Kept(file, {"sources": "one"}, {"cases": {}})
    first.found["cases"]["a"] = 1
    first.keep()
    assert Kept(file, {"sources": "one"}, {"cases": {}}).found == {"cases": {"a": 1}}
    before = file.read_bytes()
    with pytest.raises(SystemExit) as caught:
        Kept(file, {"sources": "two"}, {"cases": {}})
    assert caught.value.code == 2 and file.read_bytes() == before


def test_a_call_that_dies_while_it_writes_leaves_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sitting import Kept

    file = tmp_path / "results.json"
    kept = Kept(file, {}, {"cases": {}})
    kept.found["cases"]["a"] = 1
    kept.keep()
    before = file.read_bytes()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    kept.found["cases"]["b"] = 2
    with pytest.raises(KeyboardInterrupt):
        kept.keep()
    assert file.read_bytes() == before


def test_a_case_that_takes_too_long_is_stopped_with_its_children() -> None:
    from gpu_hour import Case, run

    fine = run(Case("fine", ("-c", "import sys; print('out'); sys.exit(3)"), 60))
    assert fine["status"] == 3 and fine["output"] == "out\n"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(300)'])"
    late = run(Case("late", ("-c", child), 1))
    assert late["status"] == 124 and late["seconds"] < 60


def test_cases_fit_into_a_call_and_nccls_rules_are_checked_first(tmp_path: Path) -> None:
    from gpu_hour import CHECKS, LARGE, MINUTES, benchmarks, checks, main, profiles

    of_bench = [benchmarks(tmp_path), benchmarks(tmp_path, LARGE - 1), benchmarks(tmp_path, tiny=True)]
    for cases in (checks(), profiles(tmp_path), *of_bench):
        assert len({case.name for case in cases}) == len(cases)
        assert all(case.seconds <= MINUTES * 60 for case in cases)
        for case in cases:
            if case.words[0].startswith("benchmarks/"):
                importlib.import_module(Path(case.words[0]).stem).parse(case.words[1:])
            elif not case.words[0].startswith("-"):
                assert case.words[0] == "tools/profile_backbone.py"
                profile_backbone.build_parser().parse_args(case.words[1:])
    assert CHECKS[0] == "test_gpu_waits"
    assert sorted(CHECKS) == sorted(path.stem for path in (ROOT / "tests/gpu").glob("test_*.py"))
    assert main(["check", "--minutes", "1", "--directory", str(tmp_path)]) == 2


def test_tests_for_a_gpu_can_be_imported_without_one_and_are_all_marked() -> None:
    for path in sorted((ROOT / "tests/gpu").glob("test_*.py")):
        module = importlib.import_module(f"tests.gpu.{path.stem}")
        marks = {mark.name: mark for mark in module.pytestmark}
        assert marks.keys() == {"gpu", "skipif"}, path.name
        assert marks["skipif"].args == (not torch.cuda.is_available(),), path.name


def test_memory_is_measured_in_turns_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_memory
    from gpu_memory_cases import FIRST, LIMITS, SMALL, cases, run_specs
    from sitting import Sitting

    names = [*cases(Gpu()), *run_specs(Gpu())]
    assert len(FIRST) == 2 and len(SMALL) == 10 and {*FIRST, *SMALL} <= set(names)
    limits = [(name, gib << 30) for gib, limited in LIMITS.items() for name in limited]
    predicted = {
        "cases": {name: {"asked": {"case": {}}} for name in names},
        "limits": [{"case": name, "limit": limit, "largest": 1, "about": {}} for name, limit in limits],
    }
    clock, asked = Clock(), []

    def run(about: dict[str, Any], name: str) -> dict[str, Any]:
        clock.now += 60
        asked.append(name)
        assert about["history"] == (name in names)
        return {"fits": True}

    monkeypatch.setattr(gpu_memory, "run", run)
    found: dict[str, Any] = {}
    for _ in range(40):
        clock.now = 0.0
        before = len(asked)
        found = gpu_memory.measurements(predicted, None, tmp_path / "kept.json", Sitting(8, clock))
        assert clock.now <= 8 * 60
        if len(asked) == before:
            break
    assert sorted(found["cases"]) == sorted(names) and len(found["limits"]) == len(limits)
    assert len(asked) == len(set(asked)) == len(names) + 2 * len(limits), "nothing is measured twice"
    assert set(asked[:2]) == {*FIRST} and set(asked[2:12]) == {*SMALL}
    of_8b = [i for i, name in enumerate(asked) if "8b" in name and name in names]
    small_limits = [i for i, name in enumerate(asked) if " GiB" in name and "8b" not in name]
    assert min(small_limits) > 11 and max(small_limits) < min(of_8b)
