"""What `expert_placement.py` has measured so far, in a file that grows case by case."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ZIPF = {f"zipf-{skew}": skew for skew in (0.0, 0.4, 0.8, 1.2)}
TEXTS = ("movie", "austen")
CASES = (*TEXTS, *ZIPF)


class Results:
    """Measured cases, and the file that they are in.

    Args:
        hardware: What they are measured on.
        order: Names of cases, in the order in which they are written.
        file: Where they are written; None: nowhere.
    """

    def __init__(self, hardware: str, order: Sequence[str], file: Path | None) -> None:
        self._order, self._file = list(order), file
        self.content: dict[str, Any] = {
            "hardware": hardware,
            "minutes": 0.0,
            "links": {},
            "cases": [],
            "traffic": {},
        }
        if file is not None and file.is_file():
            self.content = json.loads(file.read_text())

    def links(self, between: float, local: float) -> dict[str, Any]:
        """Measured links of these bandwidths in MB/s, by mode; empty if they have not been measured."""
        found: dict[str, Any] = self.content["links"].setdefault(f"{between:g} {local:g}", {})
        return found

    @property
    def traffic(self) -> dict[str, Any]:
        """Title of a case to method to bytes of each step."""
        found: dict[str, Any] = self.content["traffic"]
        return found

    def case(self, name: str, slack: float) -> dict[str, Any] | None:
        """A case, if it has been measured."""
        for case in self.content["cases"]:
            if (case["case"], case["slack"]) == (name, slack):
                found: dict[str, Any] = case
                return found
        return None

    def add_case(self, case: Mapping[str, Any]) -> None:
        """Add a case, in place of an earlier one, and write."""
        key = (case["case"], case["slack"])
        others = [own for own in self.content["cases"] if (own["case"], own["slack"]) != key]
        self.content["cases"] = sorted(
            [*others, case], key=lambda own: (self._order.index(own["case"]), own["slack"])
        )
        self.write()

    def write(self) -> None:
        """Write the file."""
        if self._file is not None:
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(self.content, indent=1) + "\n")
            partial.replace(self._file)


def title(case: str, slack: float) -> str:
    """A case's name in plots."""
    return f"{case}, {slack:g}x slots"
