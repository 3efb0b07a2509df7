"""What `expert_placement.py` has measured so far, in a file that grows case by case."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class OtherLinks(Exception):
    """The output was measured over links of other bandwidths."""


class Results:
    """Measured cases, and the file that they are in.

    Args:
        setup: What all cases share: hardware and bandwidths.
        order: Names of cases, in the order in which they are written.
        file: Where they are written; None: nowhere.

    Raises:
        OtherLinks: The file's cases were measured over other links.
    """

    def __init__(self, setup: Mapping[str, Any], order: Sequence[str], file: Path | None) -> None:
        self._order, self._file = list(order), file
        self.content: dict[str, Any] = {**setup, "minutes": 0.0, "links": {}, "cases": [], "traffic": {}}
        if file is None or not file.is_file():
            return
        before = json.loads(file.read_text())
        for name in ("between_mb_s", "local_mb_s"):
            if before[name] != setup[name]:
                raise OtherLinks(
                    f"--output {file}: its {name} is {before[name]:g}, not {setup[name]:g}: choose another file, or "
                    "--between and --local as it has them"
                )
        self.content = before

    @property
    def links(self) -> dict[str, Any]:
        """By mode: see `Worker.links`."""
        found: dict[str, Any] = self.content["links"]
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
