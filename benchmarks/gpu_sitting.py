"""What to run on a GPU that is at hand for minutes: checks side by side, then what is timed, one after the other.

    python benchmarks/gpu_sitting.py check       # make gpu-check: tests/gpu and gpu_cases.py, three minutes
    python benchmarks/gpu_sitting.py bench       # make gpu-bench: gpu_table.py, six minutes
    python benchmarks/gpu_sitting.py profile     # make gpu-profile: the planner's profile against steps, two minutes
    python benchmarks/gpu_sitting.py first       # a sitting of seven minutes: checks, the first row, kernels
    python benchmarks/gpu_sitting.py first --tiny     # the same commands on a CPU, to try them out

Each case is a command in a process group of its own. Its status and the end of its output are kept as soon as it ends,
and it is stopped when it takes too long; results of the commands themselves lie beside it. Called again, it runs what
is left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from script import ROOT, command_line
from sitting import Kept, Sitting, tell_left

MINUTES = {"check": 3.0, "bench": 6.0, "profile": 2.0, "first": 7.0}
CHECKS = sorted(file.stem for file in (ROOT / "tests" / "gpu").glob("test_*.py"))
"""Files of `tests/gpu`."""
TIMED = ("test_messages",)
"""Those that compare seconds, so that nothing may run beside them."""
FIRST_ROW = "q v, 8 sequences"
LAYERS = 4
"""Layers of the backbone that is profiled."""
_TAIL = 6000  # characters of output that are kept


@dataclass(frozen=True)
class Case:
    """A command of Python.

    Attributes:
        name: Its name in the results.
        words: The command without the program's name.
        seconds: It is stopped when it takes longer.
        alone: Whether it is timed: it runs with nothing beside it.
    """

    name: str
    words: tuple[str, ...]
    seconds: float
    alone: bool = False


def checks(directory: Path, data: Path, tiny: bool = False, seconds: int = 135) -> list[Case]:
    """Tests that need a GPU, file by file, and what users train against a CPU."""
    words = ("-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-m", "gpu")
    found = [Case(name, (*words, f"tests/gpu/{name}.py"), seconds, alone=name in TIMED) for name in CHECKS]
    jobs = max(1, (os.cpu_count() or 1) - len(CHECKS))  # a CPU each
    given = ["--data", str(data), "--output", str(directory / "cases.json"), "--seconds", str(seconds - 10)]
    given += ["--devices", "cpu", "--only", "tf32", "--jobs", "1"] if tiny else ["--jobs", f"{jobs}"]
    if not tiny and (data / "cases.json").exists():
        given += ["--devices", "cuda"]  # the CPU's losses are known
    return [*found, Case("cases", ("benchmarks/gpu_cases.py", *given), seconds)]


def benchmarks(directory: Path, minutes: float, tiny: bool = False, *only: str) -> list[Case]:
    """Our engine against PEFT: all rows of the table, or some; a second time, in case a side ends the process."""
    words = [
        "benchmarks/gpu_table.py",
        "--output",
        str(directory / "table.json"),
        "--minutes",
        f"{minutes:g}",
    ]
    words += ["--names", *only] if only else []
    words += ["--tiny"] if tiny else []
    seconds = 60 * minutes + 40
    rest = () if only else (Case("rest of the table", (*words, "--no-processes"), seconds, alone=True),)
    return [Case("table", tuple(words), seconds, alone=True), *rest]


def kernels(directory: Path, tiny: bool = False) -> Case:
    """Kernels timed by themselves."""
    words = [
        "--output",
        str(directory / "kernels.json"),
        "--minutes",
        "1",
        *(["--device", "cpu"] if tiny else []),
    ]
    return Case("kernels", ("benchmarks/gpu_kernels.py", *words), 100, alone=True)


def profiles(directory: Path) -> list[Case]:
    """The planner's profile of a random backbone, and seconds of steps: predicted against measured."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    backbone = memory / f"megatron-mux-llama3-8b-{LAYERS}"
    write = (
        "import sys, torch; from pathlib import Path; sys.path.insert(0, 'benchmarks'); import workload; "
        f"workload.write_random_backbone('llama3-8b', Path(sys.argv[1]), torch.bfloat16, {LAYERS})"
    )
    given = ("--backbone", str(backbone))
    profile = ("--json", "--directory", str(directory / "profiles"))
    measured = ("--device", "cuda", "--rounds", "2", "--output", str(directory / "policies.json"))
    return [
        Case("backbone", ("-c", write, str(backbone)), 50),
        Case("profile", ("tools/profile_backbone.py", *given, *profile), 60, alone=True),
        Case("predicted against measured", ("benchmarks/policies.py", *given, *measured), 60, alone=True),
    ]


def cases_of(what: str, directory: Path, data: Path, minutes: float, tiny: bool = False) -> list[Case]:
    """The cases of a part or of a sitting; those that run side by side first."""
    if what == "check":
        return checks(directory, data, tiny)
    if what == "bench":
        return benchmarks(directory, minutes - 0.7, tiny)
    if what == "profile":
        return profiles(directory)
    return [
        *checks(directory, data, tiny),
        *benchmarks(directory, 1.7, tiny, FIRST_ROW),
        kernels(directory, tiny),
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("what", choices=tuple(MINUTES))
    parser.add_argument(
        "--directory", type=Path, default=ROOT / ".gpu-sitting", help="for results (.gpu-sitting)"
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / ".quickstart", help="tokenizer and records of gpu_cases.py"
    )
    parser.add_argument("--minutes", type=float, help="of this call (default: those of the part)")
    parser.add_argument("--again", action="store_true", help="run cases that failed once more")
    parser.add_argument("--tiny", action="store_true", help="on a CPU; the figures mean nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left, as far as time allows; returns 1 if a case has failed."""
    arguments = parse(argv)
    minutes = arguments.minutes or MINUTES[arguments.what]
    sitting = Sitting(minutes)
    from megatron_mux.memory.store import versions

    directory = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    cases = cases_of(arguments.what, directory, arguments.data.resolve(), minutes, arguments.tiny)
    kept = Kept(directory / f"{arguments.what}.json", {"versions": dict(versions())}, {"cases": {}})
    return run_cases(cases, kept, sitting, arguments.again)


def run_cases(cases: Sequence[Case], kept: Kept, sitting: Sitting, again: bool = False) -> int:
    """Run cases that are not kept: first those side by side, then the others one by one.

    Args:
        cases: All cases.
        kept: The results of earlier calls, to which new ones are added.
        sitting: Bounds the time of this call: what still runs at its end is stopped.
        again: Whether to run failed ones once more.

    Returns:
        1 if any has failed, else 0.
    """
    done = kept.found["cases"]
    left = [case for case in cases if case.name not in done or (again and done[case.name]["status"])]
    groups = [[case for case in left if not case.alone], *([case] for case in left if case.alone)]
    for group in groups:
        if group and sitting.has_time(0):
            _run_side_by_side(group, kept, sitting)
    for name, result in done.items():
        if result["status"]:
            print(f"failed: {name}\n{result['output'][-_TAIL // 3 :]}")
    tell_left(sum(case.name not in done for case in cases), len(cases))
    return int(any(one["status"] for one in done.values()))


def _run_side_by_side(cases: Sequence[Case], kept: Kept, sitting: Sitting) -> None:
    running = [Running(case) for case in cases]
    try:
        while running:
            for one in list(running):
                if one.process.poll() is None and sitting.has_time(0) and not one.is_late:
                    continue
                running.remove(one)
                kept.found["cases"][one.case.name] = result = one.result()
                kept.keep()
                said = f"status {result['status']}, {result['seconds']:.0f} s: {one.case.name}"
                print(said, file=sys.stderr, flush=True)
            time.sleep(0.1)
    finally:
        for one in running:
            one.stop()


class Running:
    """A case's process."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._start = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        usual = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, *case.words],
            cwd=ROOT,
            env={**usual, **os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def is_late(self) -> bool:
        """Whether it takes longer than it may."""
        return time.monotonic() - self._start > self.case.seconds

    def result(self) -> dict[str, Any]:
        """End it if it still runs; returns its status (124: it was ended), seconds and the end of its output."""
        status = 124 if self.process.poll() is None else self.process.returncode
        seconds = time.monotonic() - self._start
        self.stop()
        return {"status": status, "seconds": seconds, "output": self.printed[-_TAIL:]}

    @property
    def printed(self) -> str:
        """What it has printed so far."""
        file = self._output.fileno()  # its offset is the process's, too
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def stop(self) -> None:
        """End it and its children, if they still run."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


if __name__ == "__main__":
    sys.exit(main())
