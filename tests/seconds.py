"""Plugin of pytest (`-p tests.seconds`): writes how many seconds the tests of each file took, as JSON.

The environment variable `TEST_SECONDS` names the file to write. Under pytest-xdist the controller writes it, under
torchrun rank 0.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

VARIABLE = "TEST_SECONDS"


class Stopwatch:
    """Adds up what pytest reports: setup, call and teardown of every test."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of one test."""
        self.seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        """Write the sums."""
        self.output.write_text(json.dumps(self.seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Start the stopwatch, in one process of the run."""
    if VARIABLE in os.environ and not hasattr(config, "workerinput") and os.environ.get("RANK", "0") == "0":
        config.pluginmanager.register(Stopwatch(Path(os.environ[VARIABLE])))
