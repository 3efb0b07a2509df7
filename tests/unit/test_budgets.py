"""The table of time budgets in CONTRIBUTING.md, and what a run is told about it."""

from __future__ import annotations

from pathlib import Path

from tests.budgets import Area, area_of, compare, read_budgets

ROOT = Path(__file__).resolve().parents[2]
AREAS = [Area("engine", ("unit/engine", "distributed"), 60), Area("rest", ("unit",), 40)]


def test_every_test_file_has_an_area() -> None:
    areas = read_budgets()
    files = [
        path
        for name in ("unit", "end_to_end", "distributed")
        for path in (ROOT / "tests" / name).rglob("test_*.py")
    ]
    assert files
    assert not [path for path in files if area_of(str(path.relative_to(ROOT)), areas) is None]


def test_all_budgets_together_leave_time_to_start_within_twenty_eight_minutes() -> None:
    areas = read_budgets()
    assert len({area.name for area in areas}) == len(areas) > 10
    assert all(0 < area.seconds <= 120 for area in areas)
    assert sum(area.seconds for area in areas) <= 1910


def test_the_longest_pattern_wins() -> None:
    areas = [*AREAS, Area("plans", ("distributed/*test_random",), 1)]
    found = [
        area_of(f"tests/{file}", areas)
        for file in ("distributed/test_a.py", "distributed/two/test_random.py", "gpu/x.py")
    ]
    assert [area and area.name for area in found] == ["engine", "plans", None]


def test_an_area_beyond_its_budget_is_marked_and_beyond_twice_that_too_slow() -> None:
    lines, too_slow = compare({"tests/unit/engine/test_a.py": 61.0, "tests/unit/test_b.py": 5.0}, AREAS)
    assert not too_slow
    assert [line.split()[0] for line in lines if "OVER" in line] == ["engine"]
    assert any("61  tests/unit/engine/test_a.py (engine)" in line for line in lines)
    _, too_slow = compare({"tests/unit/test_b.py": 81.0}, AREAS)
    assert too_slow == ["rest: 81 s, more than 2 times its 40 s"]


def test_on_a_slow_machine_all_budgets_grow() -> None:
    twice = {"tests/unit/engine/test_a.py": 125.0, "tests/unit/test_b.py": 85.0}
    assert not compare(twice, AREAS)[1]
    assert compare({"tests/unit/engine/test_a.py": 400.0}, [AREAS[0], Area("more", ("gpu",), 200)])[1]


def test_a_file_without_an_area_is_told() -> None:
    (line,) = compare({"tests/other/test_a.py": 1.0}, AREAS)[1]
    assert line.startswith("tests/other/test_a.py: belongs to no area")
