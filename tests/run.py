"""Run every test: `python tests/run.py [pytest arguments]`, in the environment of the Python that runs it.

Three runs of pytest: tests/unit and tests/end_to_end are shared out among workers, one more than cores (`-n 0`:
none), then under torchrun four processes for tests/distributed and two for tests/distributed/two. Importing
Megatron-Core costs seconds a process, so all of them are forked from one that has imported it (`tests/warm.py`), once
for many tests: a test that needs other sizes divides the same processes anew.

All of them run even when one fails; any failure, and a run that executed no test, makes the status 1. At the end stand
the seconds of all tests, of the slowest files and of the slowest tests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import outcomes, warm  # noqa: E402

TIME_LIMIT = 56 * 60  # seconds for one run of pytest: 17 minutes on two quiet cores, thrice that on slow ones
MOST_WORKERS = 4  # each imports Megatron-Core: 1 GiB
SLOWEST = 30  # files that are printed, and tests


@dataclass(frozen=True)
class Run:
    """One run of pytest.

    Attributes:
        folders: Folders of tests, relative to the root; those without a test file are left out.
        processes: 1 for pytest as it is, more for torchrun.
        ignored: A folder inside them that belongs to another run.
    """

    folders: tuple[str, ...]
    processes: int = 1
    ignored: str | None = None

    @property
    def workers(self) -> int:
        """Tests that run at the same time: one more than cores, as some wait for a timeout or for other processes."""
        return min(MOST_WORKERS, 1 + len(os.sched_getaffinity(0))) if self.processes == 1 else 1

    def present(self) -> list[str]:
        """The folders that hold tests of this run."""
        return [
            folder
            for folder in self.folders
            if any(
                self.ignored is None or self.ignored not in str(p) for p in (ROOT / folder).rglob("test_*.py")
            )
        ]


RUNS = (
    Run(("tests/unit", "tests/end_to_end")),
    Run(("tests/distributed",), processes=4, ignored="tests/distributed/two"),
    Run(("tests/distributed/two",), processes=2),
)


def command_of(run: Run, arguments: list[str], python: str, logs: str) -> list[str]:
    """The command line of a run, whose processes start by `python`; `logs` gets what each of torchrun's prints."""
    pytest = ["-m", "pytest", "-p", "tests.outcomes", *run.present()]
    if run.ignored:
        pytest.append(f"--ignore={run.ignored}")
    if run.processes == 1:
        workers = [f"--tx={run.workers}*popen//python={python}", "--dist=worksteal"]
        return [sys.executable, *pytest, *workers, *arguments]
    # A process that waits in a collective cannot be interrupted by a signal: a stuck test ends its process.
    pytest += [*arguments, "-p", "no:cacheprovider", "--override-ini=timeout_method=thread"]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [
        f"--nproc-per-node={run.processes}",
        f"--log-dir={logs}",
        "--tee=3",
        "--local-ranks-filter=0",
    ]
    return [*torchrun, *pytest]


def environment() -> dict[str, str]:
    """One thread a process, as several share the machine; nothing is looked for on a model hub.

    No GPU is in sight: tests that pretend to have one run where there is a real one too (`make gpu-check` has its own).
    """
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    return {**own, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Result:
    """What came of one run.

    Attributes:
        well: Whether all went well.
        counts: Those of pytest's closing line: `{"passed": 12, ...}`.
        seconds: Each test's share of the run's wall-clock seconds: its own, divided by the tests that run at the same
            time.
        failed: The tests that failed.
    """

    well: bool
    counts: dict[str, int]
    seconds: Counter[str]
    failed: list[str]


def execute(run: Run, arguments: list[str], python: str) -> Result:
    """Run it, showing what it prints; one that takes longer than its limit is interrupted, so that it sums up."""
    closing = ""
    with tempfile.TemporaryDirectory() as logs:
        output = Path(logs) / "outcomes.jsonl"
        output.touch()
        process = subprocess.Popen(
            command_of(run, arguments, python, logs),
            cwd=ROOT,
            env={**os.environ, outcomes.VARIABLE: str(output), warm.VARIABLE: python},
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        limits = [
            threading.Timer(TIME_LIMIT, process.send_signal, (signal.SIGINT,)),
            threading.Timer(TIME_LIMIT + 30, process.kill),
        ]
        for limit in limits:
            limit.start()
        for line in process.stdout:
            line = re.sub(r"^\[default\d+\]:", "", line)
            print(line, end="", flush=True)
            if re.search(r"=+ .*\b\d+ \w+.* in [\d.]+s", line):
                closing = line
        status = process.wait()
        for limit in limits:
            limit.cancel()
        if status and run.processes > 1:
            show_other_ranks(Path(logs))
        phases = [json.loads(line) for line in output.read_text().splitlines()]
    words = re.findall(r"(\d+) (\w+)", closing.split(" in ")[0])
    counts = {word.rstrip("s"): int(number) for number, word in words}
    shares: Counter[str] = Counter()
    for phase in phases:
        shares[phase["test"]] += phase["seconds"] / run.workers
    failed = [phase["test"] for phase in phases if phase["failed"]]
    return Result(status == 0 and counts.get("passed", 0) > 0, counts, shares, failed)


def show_other_ranks(logs: Path) -> None:
    """The end of what ranks printed that tell of a failure: it may be seen on another rank than the first."""
    for log in sorted(logs.rglob("std*.log")):
        text = log.read_text(errors="replace")
        if log.parent.name != "0" and re.search(r"FAILED|ERROR|Timeout|Traceback", text):
            print(f"--- rank {log.parent.name}", *text.splitlines()[-40:], sep="\n", flush=True)


def main() -> int:
    """Run them all; the closing line sums them up."""
    total: Counter[str] = Counter()
    spent: Counter[str] = Counter()  # seconds
    failed = []
    os.environ.update(environment())
    with warm.Server() as server:
        for run in RUNS:
            if not run.present():
                continue
            label = f"{' '.join(run.present())}, {run.processes} process{'es' if run.processes > 1 else ''}"
            print(f"\n##### {label}", flush=True)
            start = time.monotonic()
            result = execute(run, sys.argv[1:], server.python)
            total.update(result.counts)
            spent.update(result.seconds)
            verdict = "passed" if result.well else "FAILED"
            print(f"##### {label}: {verdict} after {time.monotonic() - start:.0f} s", flush=True)
            if not result.well:
                failed.append("\n  ".join([label, *result.failed]))
    by_file: Counter[str] = Counter()
    for test, taken in spent.items():
        by_file[test.partition("::")[0]] += taken
    print(f"\n{sum(spent.values()):8.0f}  seconds of all tests; the slowest files and tests:")
    for name, taken in (*by_file.most_common(SLOWEST), *spent.most_common(SLOWEST)):
        print(f"{taken:8.0f}  {name}")
    for label in failed:
        print(f"FAILED, or ran no test: {label}")
    broken = max(total["failed"] + total["error"], len(failed))
    print(f"total: {total['passed']} passed, {broken} failed, {total['skipped']} skipped", flush=True)
    return 1 if failed or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
