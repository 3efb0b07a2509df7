"""Plants the faults of `planted_faults.yaml` one at a time, and says which test catches each.

    python tests/planted_faults.py --area isolation
    python tests/planted_faults.py --jobs 2 --state build/faults.json    # all of them; again: what is left

Each job has a copy of the tree, from which everything is imported. A fault counts as caught by the first test that
fails with it, if the same test passes without it: those are run at the end. The status is 1 if a fault is not caught
or cannot be planted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import run, warm  # noqa: E402

_FAILED = re.compile(
    r"^(?:\[default\d+\]:)?(?:FAILED|ERROR) (tests/\S+\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE
)
_SECONDS = re.compile(r" in ([\d.]+)s\b")
_TIMED_OUT = (124, 137)
_mtimes = count(int(time.time()) + 2, 2)  # of changed files: bytecode is found anew by a whole second


@dataclass(frozen=True)
class Fault:
    """An entry of the list; `file` is where `old` is expected, but it may have moved to another one."""

    id: str
    area: str
    user: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    harmless: str = ""

    def place(self, root: Path) -> Path:
        """The file of the package that has `old` once.

        Raises:
            ValueError: There is none.
        """
        named = root / self.file
        files = (
            [named] if named.exists() and self.old in named.read_text() else root.glob("megatron_mux/**/*.py")
        )
        found = [path for path in files if self.old in path.read_text()]
        if len(found) != 1 or found[0].read_text().count(self.old) != 1:
            raise ValueError(f"{self.id}: its text is not once in {self.file}, nor in one other file")
        return found[0]


@dataclass(frozen=True)
class Outcome:
    """What pytest found: ids of tests that failed, its seconds, and whether it ran into the limit."""

    failed: Sequence[str]
    seconds: float
    timed_out: bool = False


@dataclass
class Copy:
    """A copy of the tracked files.

    Attributes:
        root: Where it is.
        limit: Seconds of a run of pytest.
    """

    root: Path
    limit: float

    def fill(self) -> None:
        """Copy the files, and make sure that Python takes the package from here."""
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if os.path.lexists(ROOT / name):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        if (ROOT / ".quickstart").exists():
            (self.root / ".quickstart").symlink_to((ROOT / ".quickstart").resolve())
        code = "import megatron_mux; print(megatron_mux.__file__)"
        shown = subprocess.run(
            [sys.executable, "-c", code],
            cwd="/",
            env=self._environment(),
            check=True,
            capture_output=True,
            text=True,
        )
        if not Path(shown.stdout.strip()).is_relative_to(self.root):
            raise RuntimeError(
                f"the package would be imported from {shown.stdout.strip()}, not from the copy"
            )

    def _environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in (warm.VARIABLE, warm.COLD)}
        return {**inherited, **run.environment(), "PYTHONPATH": str(self.root)}

    def expanded(self, tests: Sequence[str]) -> list[str]:
        """Files of tests for names below `tests/`, in this order, each once; ids stay as they are."""
        found: list[str] = []
        for name in tests:
            paths = [self.root / "tests" / name] if "::" in name else sorted(self.root.glob(f"tests/{name}"))
            for path in paths:
                found += map(str, sorted(path.rglob("test_*.py"))) if path.is_dir() else [str(path)]
        return list(dict.fromkeys(os.path.relpath(path, self.root) for path in found))

    def test(self, tests: Sequence[str], left_out: Collection[str], stop: bool = True) -> Outcome:
        """Run tests: on one process, then those below `distributed` on as many as they need.

        Raises:
            ValueError: There is no such test.
        """
        outcome = Outcome((), 0.0)
        files = sorted(self.expanded(tests), key=_processes)
        if not files:
            raise ValueError(f"there are no tests {' '.join(tests)}")
        for processes, group in groupby(files, _processes):
            found = self._pytest(processes, list(group), left_out, stop)
            failed = (*outcome.failed, *found.failed)
            outcome = Outcome(failed, outcome.seconds + found.seconds, found.timed_out)
            if stop and (outcome.failed or outcome.timed_out):
                break
        return outcome

    def _pytest(self, processes: int, files: Sequence[str], left_out: Collection[str], stop: bool) -> Outcome:
        with tempfile.TemporaryDirectory() as logs:
            command = ["timeout", "--kill-after=10", f"{self.limit:g}", sys.executable, "-m"]
            if processes > 1:
                command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
                command += [f"--log-dir={logs}", "--redirects=3", "-m"]
            command += [
                "pytest",
                *files,
                "-q",
                "-rfE",
                "-n",
                "0",
                "-p",
                "no:cacheprovider",
                "--no-header",
                "--tb=no",
            ]
            command += ["--override-ini=timeout_method=thread"] if processes > 1 else []
            command += [f"--deselect={name}" for name in sorted(left_out)] + ["-x"] * stop
            with open(f"{logs}/std.log", "w") as log:
                began = time.monotonic()
                status = subprocess.run(
                    command, cwd=self.root, env=self._environment(), stdout=log, stderr=log, check=False
                ).returncode
            text = "\n".join(
                path.read_text(errors="replace") for path in sorted(Path(logs).rglob("std*.log"))
            )
        seconds = max(map(float, _SECONDS.findall(text)), default=time.monotonic() - began)
        failed = list(dict.fromkeys(_FAILED.findall(text)))
        if status in _TIMED_OUT and not failed:
            return Outcome((), self.limit, timed_out=True)
        if status not in (0, 1) or (status and not failed):
            failed = failed or [f"{files[0]} (status {status})"]
        return Outcome(failed if status else (), seconds)

    def plant(self, fault: Fault, left_out: Collection[str]) -> Outcome:
        """Run the tests of a fault with it."""
        path = fault.place(self.root)
        text = path.read_text()
        try:
            _write(path, text.replace(fault.old, fault.new))
            return self.test(fault.tests, left_out)
        finally:
            _write(path, text)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    at = next(_mtimes)
    os.utime(path, (at, at))


def _processes(test: str) -> int:
    """Processes that a test needs."""
    return 1 if "distributed/" not in test else 2 if "distributed/two/" in test else 4


@dataclass
class State:
    """What is known so far.

    Attributes:
        file: Where it is kept; None: nowhere.
        broken: Tests that fail without a fault, which are left out.
        faults: By id: `area`, `caught` by which test, `seconds`, and `sure`: that test passes without the fault.
    """

    file: Path | None
    broken: set[str] = field(default_factory=set)
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> None:
        """Go on from the file."""
        if self.file is not None and self.file.exists():
            kept = json.loads(self.file.read_text())
            self.broken, self.faults = set(kept["broken"]), kept["faults"]

    def note(self, fault: Fault, **found: Any) -> None:
        """Add what was found of a fault, and print it."""
        with self._lock:
            self.faults[fault.id] = {"area": fault.area, **found}
            caught = found["caught"] or "NOT caught"
            print(f"{fault.id}: {caught}, {found['seconds']:.0f} s", found.get("problem", ""), flush=True)
            self.write()

    def write(self) -> None:
        """Keep it."""
        if self.file is not None:
            kept = {"broken": sorted(self.broken), "faults": self.faults}
            self.file.write_text(json.dumps(kept, indent=1) + "\n")


def plant(fault: Fault, copy: Copy, state: State) -> None:
    """Find which test catches a fault."""
    try:
        outcome = copy.plant(fault, state.broken)
    except ValueError as error:
        state.note(fault, caught="", seconds=0.0, sure=True, problem=str(error))
        return
    caught, seconds = next(iter(outcome.failed), ""), outcome.seconds
    if outcome.timed_out and not caught:
        without = copy.test(fault.tests, state.broken)
        caught = "" if without.timed_out or without.failed else "hangs"
        state.note(fault, caught=caught, seconds=seconds, sure=True)
        return
    state.note(fault, caught=caught, seconds=seconds, sure=not caught)


def confirm(copy: Copy, state: State) -> bool:
    """Run the tests that have caught something without a fault; returns whether all of them pass.

    What those that fail have caught is forgotten.
    """
    unsure = {name: own for name, own in state.faults.items() if not own.get("sure", True)}
    if not unsure:
        return True
    files = list(dict.fromkeys(own["caught"].partition(" (status")[0] for own in unsure.values()))
    tests = [name.removeprefix("tests/") for name in files]
    outcome = replace(copy, limit=len(tests) * copy.limit).test(tests, state.broken, stop=False)
    failed = set(outcome.failed)
    for name, own in unsure.items():
        if own["caught"].partition(" (status")[0] in failed:
            print(f"{own['caught']} fails without a fault, too: it is left out")
            state.broken.add(own["caught"])
            del state.faults[name]
        else:
            own["sure"] = not outcome.timed_out
    state.write()
    return not failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="only these faults")
    parser.add_argument("--area", help="only faults of this area")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a run of pytest (%(default)g)")
    parser.add_argument("--jobs", type=int, default=1, help="faults planted at the same time, each in a copy")
    parser.add_argument(
        "--state", type=Path, help="JSON file of what was found, from which a later call goes on"
    )
    return parser


def _chosen(arguments: argparse.Namespace) -> Iterator[Fault]:
    for entry in yaml.safe_load((ROOT / "tests/planted_faults.yaml").read_text()):
        fault = Fault(**entry)
        is_chosen = arguments.area in (None, fault.area) and (
            not arguments.only or fault.id in arguments.only
        )
        if is_chosen and not fault.harmless:
            yield fault


def main() -> int:
    """Plant the chosen faults."""
    arguments = _parser().parse_args()
    state = State(arguments.state)
    state.read()
    faults, free = list(_chosen(arguments)), SimpleQueue[Copy]()

    def one(fault: Fault) -> None:
        copy = free.get()
        try:
            plant(fault, copy, state)
        finally:
            free.put(copy)

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.jobs) as pool:
        for job in range(arguments.jobs):
            copy = Copy(Path(directory).resolve() / f"copy{job}", arguments.limit)
            copy.fill()
            free.put(copy)
        done = False
        while not done:
            list(pool.map(one, [fault for fault in faults if fault.id not in state.faults]))
            done = confirm(copy, state)
    missed = [
        fault.id
        for fault in faults
        if not (state.faults[fault.id]["caught"] and state.faults[fault.id]["sure"])
    ]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults are caught", *missed, sep="\n  ")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
