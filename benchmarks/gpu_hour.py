"""The first hour on a GPU: checks, benchmarks and the planner's profile, in calls of at most eight minutes.

    python benchmarks/gpu_hour.py check      # make gpu-check: the tests that need a GPU, NCCL's rules first
    python benchmarks/gpu_hour.py bench      # make gpu-bench: against PEFT and zero-padding; memory of 32 tasks
    python benchmarks/gpu_hour.py profile    # make gpu-profile: the planner's profile, predicted against measured
    python benchmarks/gpu_hour.py bench --tiny     # the same cases on a CPU, to try them out

Each case is a command in a process of its own. Its status and output are kept as soon as it ends, and it is stopped
when it takes too long. A call begins no case that might not end in time: called again, it goes on with the next one.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from script import command_line
from sitting import Kept, Sitting, tell_left

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 8.0
LAYERS = 8
"""Layers of Llama-3-8B's shape in most cases: all 32 take four times as long to load, four sides at once."""
LARGE = 100 << 30
"""Bytes of a GPU on which all sides fit at once, with so many layers and 32 sequences of each task."""
CHECKS = (
    "test_gpu_waits",
    "test_steady_steps",
    "test_triton_on_gpu",
    "test_triton_rows_on_gpu",
    "test_messages",
    "test_isolation_on_gpu",
    "test_on_gpu",
)
"""Files of `tests/gpu`, NCCL's rules first: if they do not hold, a pipeline may hang."""
_TAIL = 8000  # characters of output that are kept


@dataclass(frozen=True)
class Case:
    """A command of Python.

    Attributes:
        name: Its name in the results.
        words: The command without the program's name.
        seconds: It is stopped when it takes longer.
    """

    name: str
    words: tuple[str, ...]
    seconds: int


def checks() -> list[Case]:
    """The tests that need a GPU, file by file."""
    words = ("-m", "pytest", "-m", "gpu", "-q", "-rA", "-p", "no:cacheprovider")
    return [Case(name, (*words, f"tests/gpu/{name}.py"), 180) for name in CHECKS]


def benchmarks(directory: Path, device_bytes: int = LARGE, tiny: bool = False) -> list[Case]:
    """Against PEFT and zero-padded batches: what matters most first.

    Args:
        directory: For results and random backbones.
        device_bytes: Memory of the GPU: on a small one, backbones have fewer layers.
        tiny: On the CPU with a tiny backbone and single steps: the figures mean nothing.
    """
    large = device_bytes >= LARGE
    few = ("--layers", str(LAYERS if large else LAYERS // 2))
    machine = ("--device", "cuda", "--backbone-shape", "llama3-8b")
    last: tuple[str, ...] = ()
    if tiny:
        machine = ("--device", "cpu", "--backbone-shape", "tiny", "--threads", "1")
        last = ("--layers", "2", "--repeats", "1", "--steps", "1", "--warm-up", "1")

    def file(name: str) -> str:
        return str(directory / f"{name.replace(', ', '-').replace(' ', '-')}.json")

    def case(name: str, seconds: int, *words: str, dtype: str = "bfloat16") -> Case:
        start = (
            "benchmarks/vs_peft.py",
            *machine,
            "--dtype",
            dtype,
            "--scratch",
            str(directory / "backbones"),
        )
        return Case(name, (*start, *words, *last, "--output", file(name)), seconds)

    def speed(name: str, seconds: int, sequences: int, *words: str, dtype: str = "bfloat16") -> Case:
        words = ("--sequences", str(sequences), "--skip-memory", *words)
        return case(name, seconds, *words, dtype=dtype)

    packed, padded = ("--rival", "packed"), ("--rival", "padded")
    curves = [
        speed("bf16, 8 sequences, packed", 180, 8, *few, *packed, "--profile"),
        speed("bf16, 8 sequences, padded", 200, 8, *few, *padded, "--zero-padded"),
        speed("bf16, 2 sequences", 220, 2, *few, "--zero-padded"),
        speed("bf16, 32 sequences, packed", 200, 32, *few, *packed),
        speed("bf16, 32 sequences, padded", 200, 32, *few, *padded),
    ]
    plotted = ("benchmarks/vs_peft_crossover.py", *(file(one.name) for one in curves))
    return [
        *curves,
        Case("crossover", (*plotted, "--output", file("crossover")), 60),
        case("bf16, memory", 420, *few, *packed, "--skip-speed", "--replicas", "32"),
        speed("bf16, all layers, packed", 300, 8 if large else 2, *packed, "--repeats", "3"),
        speed("fp32, 8 sequences", 300, 8, *few, "--repeats", "3", dtype="float32"),
    ]


def profiles(directory: Path) -> list[Case]:
    """The planner's profile of a random backbone, and seconds of steps: predicted against measured."""
    backbone = directory / "backbones" / f"llama3-8b-{LAYERS}-bfloat16"
    write = (
        "import sys, torch; from pathlib import Path; sys.path.insert(0, 'benchmarks'); import workload; "
        f"workload.write_random_backbone('llama3-8b', Path(sys.argv[1]), torch.bfloat16, {LAYERS})"
    )
    given = ("--backbone", str(backbone))
    profile = ("--json", "--directory", str(directory / "profiles"))
    measured = ("--device", "cuda", "--rounds", "3", "--output", str(directory / "policies.json"))
    return [
        Case("backbone", ("-c", write, str(backbone)), 120),
        Case(
            "profile",
            ("tools/profile_backbone.py", *given, *profile),
            240,
        ),
        Case("predicted against measured", ("benchmarks/policies.py", *given, *measured), 420),
    ]


CASES = ("check", "bench", "profile")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("what", choices=CASES)
    parser.add_argument("--directory", type=Path, default=ROOT / ".gpu-hour", help="for results (.gpu-hour)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of this call ({MINUTES:g})")
    parser.add_argument("--again", action="store_true", help="run cases that failed once more")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="for bench: on the CPU with a tiny backbone; the figures mean nothing",
    )
    arguments = parser.parse_args(argv)
    if arguments.tiny and arguments.what != "bench":
        parser.error("--tiny is for bench only")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left, as far as time allows; returns 1 if a case has failed."""
    arguments = parse(argv)
    import torch

    from megatron_mux.memory.store import versions

    if not (arguments.tiny or torch.cuda.is_available()):
        print("gpu_hour.py: this machine has no GPU", file=sys.stderr)
        return 2
    directory = (arguments.directory / "tiny" if arguments.tiny else arguments.directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if arguments.what == "bench":
        own = LARGE if arguments.tiny else torch.cuda.get_device_properties(0).total_memory
        cases = benchmarks(directory, own, arguments.tiny)
    else:
        cases = checks() if arguments.what == "check" else profiles(directory)
    longest = max(case.seconds for case in cases)
    if arguments.minutes * 60 < longest:
        print(f"--minutes {arguments.minutes:g}: a case may take {longest} s", file=sys.stderr)
        return 2
    kept = Kept(directory / f"{arguments.what}.json", {"versions": dict(versions())}, {"cases": {}})
    return run_cases(cases, kept, Sitting(arguments.minutes), arguments.again)


def run_cases(cases: Sequence[Case], kept: Kept, sitting: Sitting, again: bool = False) -> int:
    """Run cases in order, without those that are kept; returns 1 if any has failed.

    Args:
        cases: All cases.
        kept: The results of earlier calls, to which new ones are added.
        sitting: Bounds the time of this call.
        again: Whether to run failed ones once more.
    """
    done = kept.found["cases"]
    left = [case for case in cases if case.name not in done or (again and done[case.name]["status"])]
    while left and sitting.has_time(left[0].seconds):
        case = left.pop(0)
        print(case.name, file=sys.stderr, flush=True)
        done[case.name] = run(case)
        kept.keep()
    for name, one in done.items():
        print(f"{'failed' if one['status'] else 'done'} in {one['seconds']:.0f} s: {name}")
        if one["status"]:
            print(one["output"])
    tell_left(len(left), len(cases))
    return int(any(one["status"] for one in done.values()))


def run(case: Case) -> dict[str, Any]:
    """Run a case; returns its status (124: it took too long), its seconds and the end of its output."""
    start = time.monotonic()
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **os.environ}
    process = subprocess.Popen(
        [sys.executable, *case.words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, status = process.communicate(timeout=case.seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children, too
        output, status = process.communicate()[0], 124
    return {"status": status, "seconds": time.monotonic() - start, "output": output[-_TAIL:]}


if __name__ == "__main__":
    sys.exit(main())
