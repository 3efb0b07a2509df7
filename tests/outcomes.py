"""Plugin of pytest (`-p tests.outcomes`): tells each failure when it happens and writes a summary as JSON at the end.

A run that is ended by a time limit would lose its failures otherwise. The summary, `{"seconds": {file: seconds},
"failed": [test, ...]}`, goes to the file that the environment variable `TEST_OUTCOMES` names. Under pytest-xdist the
controller writes it, under torchrun rank 0.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

VARIABLE = "TEST_OUTCOMES"


class Outcomes:
    """Adds up what pytest reports: setup, call and teardown of every test."""

    def __init__(self, output: Path, config: pytest.Config) -> None:
        self.output = output
        self.config = config
        self.seconds: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of one test."""
        self.seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
        if report.failed:
            self.failed.append(report.nodeid)
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            assert reporter is not None
            last = report.longreprtext.rstrip().rpartition("\n")[2]
            reporter.write_line(f"\nFAILED {report.nodeid} after {report.duration:.0f} s: {last[:200]}")

    def pytest_sessionfinish(self) -> None:
        """Write the summary."""
        self.output.write_text(json.dumps({"seconds": self.seconds, "failed": self.failed}))


def pytest_configure(config: pytest.Config) -> None:
    """Listen in one process of the run."""
    if VARIABLE in os.environ and not hasattr(config, "workerinput") and os.environ.get("RANK", "0") == "0":
        config.pluginmanager.register(Outcomes(Path(os.environ[VARIABLE]), config))
