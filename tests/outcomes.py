"""Plugin of pytest (`-p tests.outcomes`): tells each failure when it happens, and notes every test in a file.

What a run has done that is ended by a time limit is not lost: the file that the environment variable `TEST_OUTCOMES`
names gets a line of JSON for each phase of each test, `{"test": ..., "seconds": ..., "failed": ...}`. Under
pytest-xdist the controller writes it, under torchrun rank 0.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "TEST_OUTCOMES"


class Outcomes:
    """Notes what pytest reports: setup, call and teardown of every test."""

    def __init__(self, output: Path, config: pytest.Config) -> None:
        self.output = output
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of one test."""
        line = {"test": report.nodeid, "seconds": report.duration, "failed": report.failed}
        with open(self.output, "a") as file:
            file.write(json.dumps(line) + "\n")
        if report.failed:
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            assert reporter is not None
            last = report.longreprtext.rstrip().rpartition("\n")[2]
            reporter.write_line(f"\nFAILED {report.nodeid} after {report.duration:.0f} s: {last[:200]}")


def pytest_configure(config: pytest.Config) -> None:
    """Listen in one process of the run."""
    if VARIABLE in os.environ and not hasattr(config, "workerinput") and os.environ.get("RANK", "0") == "0":
        config.pluginmanager.register(Outcomes(Path(os.environ[VARIABLE]), config))
