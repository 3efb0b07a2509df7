"""Measurements on a GPU in several sittings: order, limit of time, what is kept. Stubs stand in for the cases."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.gpus import Gpu

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


class Stub:
    """In the place of `gpu_sitting.Running`: ends at a time of the clock."""

    clock: Clock
    told: list[str]
    failing: tuple[str, ...] = ()

    def __init__(self, case: Any) -> None:
        self.case, self.process = case, self
        self.told.append(f"{case.name} begins")
        self._end = self.clock.now + float(case.words[0])

    def poll(self) -> int | None:
        return 0 if self.clock.now >= self._end else None

    @property
    def is_late(self) -> bool:
        return False

    def result(self) -> dict[str, Any]:
        status = 124 if self.poll() is None else int(self.case.name in self.failing)
        self.told.append(f"{self.case.name} ends")
        return {"status": status, "seconds": 1.0, "output": f"{self.case.name} said this"}

    def stop(self) -> None:
        pass


def sit(
    file: Path, monkeypatch: pytest.MonkeyPatch, *failing: str, again: bool = False, minutes: float = 1.0
) -> tuple[int, list[str]]:
    """One call with two cases side by side, of 20 and 10 seconds, and two alone, of 20 each; and what happened."""
    import gpu_sitting
    from sitting import Kept, Sitting

    clock, told = Clock(), list[str]()
    monkeypatch.setattr(Stub, "clock", clock, raising=False)
    monkeypatch.setattr(Stub, "told", told, raising=False)
    monkeypatch.setattr(Stub, "failing", failing)
    monkeypatch.setattr(gpu_sitting, "Running", Stub)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(gpu_sitting.time, "sleep", sleep)
    made = [("a", 20, False), ("b", 10, False), ("c", 20, True), ("d", 20, True)]
    cases = [gpu_sitting.Case(name, (str(seconds),), 25, alone) for name, seconds, alone in made]
    kept = Kept(file, {"versions": "1"}, {"cases": {}})
    return gpu_sitting.run_cases(cases, kept, Sitting(minutes, clock), again), told


def test_checks_run_side_by_side_then_what_is_timed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, told = sit(tmp_path / "first.json", monkeypatch, minutes=2)
    assert status == 0
    assert told == [
        *("a begins", "b begins", "b ends", "a ends"),
        *("c begins", "c ends", "d begins", "d ends"),
    ]
    assert list(json.loads((tmp_path / "first.json").read_text())["cases"]) == ["b", "a", "c", "d"]


def test_a_sitting_ends_in_time_and_the_next_one_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "first.json"
    assert sit(file, monkeypatch, minutes=0.5)[0] == 1
    kept = json.loads(file.read_text())["cases"]
    assert {name: one["status"] for name, one in kept.items()} == {"a": 0, "b": 0, "c": 124}
    said = capsys.readouterr()
    assert "c said this" in said.out and "1 of 4 left: run the same command again" in said.err
    assert sit(file, monkeypatch) == (1, ["d begins", "d ends"])
    assert sit(file, monkeypatch, again=True) == (0, ["c begins", "c ends"])
    assert sit(file, monkeypatch) == (0, [])


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


def test_a_case_that_takes_too_long_is_stopped_with_its_children() -> None:
    from gpu_sitting import Case, Running

    fine = Running(Case("fine", ("-c", "import sys; print('out'); sys.exit(3)"), 60))
    fine.process.wait(60)
    found = fine.result()
    assert (found["status"], found["output"]) == (3, "out\n")
    child = (
        "import subprocess; one = subprocess.Popen(['sleep', '300']); print(one.pid, flush=True); one.wait()"
    )
    late = Running(Case("late", ("-c", child), 0.0))
    while not late.printed:
        time.sleep(0.01)
    assert late.is_late
    found = late.result()
    assert found["status"] == 124
    state = Path(f"/proc/{found['output'].strip()}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":
        time.sleep(0.01)


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
