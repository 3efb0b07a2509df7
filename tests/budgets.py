"""Time budgets of the tests, area by area: the table in CONTRIBUTING.md, and how a run compares with it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
FAILS_BEYOND = 2.0  # times the budget
SLOWEST = 12  # files that are printed


@dataclass(frozen=True)
class Area:
    """A row of the table.

    Attributes:
        name: The area.
        patterns: Its test files and folders, relative to `tests/`; `*` stands for any characters.
        seconds: Its budget.
    """

    name: str
    patterns: tuple[str, ...]
    seconds: float

    def match(self, file: str) -> int:
        """Length of the longest pattern that matches the beginning of a path below `tests/`; 0: none does."""
        return max(
            (len(p) for p in self.patterns if re.match(re.escape(p).replace(r"\*", ".*"), file)), default=0
        )


def read_budgets(table: Path = TABLE) -> list[Area]:
    """The areas of the table in CONTRIBUTING.md."""
    rows = re.findall(r"^\| ([^|`]+?) +\| (`[^|]+`) +\| +(\d+) \|$", table.read_text(), re.MULTILINE)
    return [
        Area(name, tuple(re.findall("`([^`]+)`", patterns)), float(budget)) for name, patterns, budget in rows
    ]


def area_of(file: str, areas: list[Area]) -> Area | None:
    """The area that a test file belongs to: the one with the longest matching pattern.

    Args:
        file: Path relative to the root, as in pytest's node ids.
        areas: See `read_budgets`.
    """
    inside = file.removeprefix("tests/")
    best = max(areas, key=lambda area: area.match(inside), default=None)
    return best if best is not None and best.match(inside) else None


def compare(seconds: Mapping[str, float], areas: list[Area]) -> tuple[list[str], list[str]]:
    """Compare a run with the budgets.

    A machine may be slower than the one the budgets were set on: if all tests together take longer than all budgets
    together, every budget is extended by that factor before an area is called too slow.

    Args:
        seconds: Wall-clock seconds of the run by test file.
        areas: See `read_budgets`.

    Returns:
        Lines to print, and one line for each area that is too slow: beyond `FAILS_BEYOND` times its budget.
    """
    used: Counter[str] = Counter()
    homeless = []
    for file, value in seconds.items():
        area = area_of(file, areas)
        if area is None:
            homeless.append(f"{file}: belongs to no area of the table in CONTRIBUTING.md")
        else:
            used[area.name] += value  # type: ignore[assignment]
    allowed = sum(area.seconds for area in areas)
    slower = max(1.0, sum(seconds.values()) / allowed)
    lines = ["", f"{'area':24}{'seconds':>8}{'budget':>8}"]
    too_slow = homeless
    for area in sorted(areas, key=lambda area: -used[area.name]):
        over = "  OVER ITS BUDGET" if used[area.name] > area.seconds else ""
        if used[area.name]:
            lines.append(f"{area.name:24}{used[area.name]:8.0f}{area.seconds:8.0f}{over}")
        if used[area.name] > FAILS_BEYOND * slower * area.seconds:
            too_slow.append(
                f"{area.name}: {used[area.name]:.0f} s, more than {FAILS_BEYOND:g} times its {area.seconds:.0f} s"
            )
    lines.append(f"{'all':24}{sum(seconds.values()):8.0f}{allowed:8.0f}")
    lines += ["", "slowest files:"]
    for file, value in sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST]:
        area = area_of(file, areas)
        lines.append(f"{value:8.0f}  {file} ({area.name if area else 'no area'})")
    return lines, too_slow


def enforced() -> bool:
    """Whether an area that is too slow fails the run: in CI."""
    return os.environ.get("CI", "") not in ("", "false", "0")
