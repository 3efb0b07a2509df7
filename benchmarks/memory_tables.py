"""Tables of bytes against dry runs of the engine: families x adapter kinds x ranks x savings, and mixtures of tasks.

python benchmarks/memory_tables.py --cases 40                     # drawn by seed: some twenty minutes on two cores
python benchmarks/memory_tables.py --cases 40 --mixtures 30 --output benchmarks/results/memory-tables.json
python benchmarks/memory_tables.py --dtype float32 --output benchmarks/results/memory-tables-fp32.json
python benchmarks/memory_tables.py --cases 0 --on-cpu --output benchmarks/results/memory-tables-cpu.json

A table is solved from a run of three layers of each stage at a few sizes, and of two at one, on fake tensors; the dry
run that it is compared with has up to twelve layers and records of other lengths. Both are bytes of tensors on the
first rank of each stage. Nothing is measured: the result is the same on every machine. With `--output`, cases that it
has are not run again. The exit status is 1 if an error exceeds `--tolerance`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from tests.end_to_end.table_cases import Case


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=40, help="of one kind each (40)")
    parser.add_argument("--mixtures", type=int, default=0, help="of three kinds in a micro-batch (0)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of drawn cases")
    parser.add_argument("--on-cpu", action="store_true", help="eight cases on a CPU, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=0.025)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, compare and publish after each case."""
    arguments = parse(argv)
    from tests.end_to_end.table_cases import drawn, on_cpu

    seed, dtype = arguments.seed, arguments.dtype
    cases = [*drawn(arguments.cases, seed, 0, dtype), *drawn(arguments.mixtures, seed, 3, dtype)]
    cases += on_cpu() if arguments.on_cpu else []
    found: dict[str, list[dict[str, Any]]] = {}
    if arguments.output is not None and arguments.output.exists():
        found = json.loads(arguments.output.read_text())["cases"]
    for case in cases:
        key = f"{case.name}, seed {case.seed}"
        if key not in found:
            found[key] = _compared(case)
            if arguments.output is not None:
                publish(_result(found), _markdown(found), arguments.output)
    if arguments.output is None:
        publish(_result(found), _markdown(found), None)
    return int(any(abs(one["off"]) > arguments.tolerance for own in found.values() for one in own))


def _compared(case: Case) -> list[dict[str, Any]]:
    from tests.end_to_end.table_cases import compare

    made = []
    with tempfile.TemporaryDirectory() as directory:
        for one in compare(case, Path(directory)):
            print(one, file=sys.stderr, flush=True)
            made.append(one.to_json())
    return made


def _result(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {"cases": found, "summary": {name: _summary(own) for name, own in _parts(found).items()}}


def _parts(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Absolute errors of stages, of one kind and of mixtures."""
    parts: dict[str, list[float]] = {"one kind": [], "mixtures": []}
    for own in found.values():
        for one in own:
            parts["mixtures" if len(one["case"]["kinds"]) > 1 else "one kind"].append(abs(one["off"]))
    return {name: errors for name, errors in parts.items() if errors}


def _summary(errors: Sequence[float]) -> dict[str, float]:
    return {"stages": len(errors), "median": statistics.median(errors), "worst": max(errors)}


def _markdown(found: dict[str, list[dict[str, Any]]]) -> str:
    """Render the tables."""
    lines = ["Peak bytes of tensors from tables, over those of dry runs.", ""]
    rows = [
        (name, len(own), f"{statistics.median(own):.3%}", f"{max(own):.2%}")
        for name, own in _parts(found).items()
    ]
    lines += table("tasks | stages | median error | worst", rows)
    worst = sorted((one for own in found.values() for one in own), key=lambda one: -abs(one["off"]))
    lines += ["", "Furthest off:", ""]
    names = ("family", "ranks", "saving", "layers")
    lines += table(
        "backbone | ranks | saving | layers | kinds | stage | error",
        [
            (
                *(one["case"][n] for n in names),
                " + ".join(one["case"]["kinds"]),
                one["stage"],
                f"{one['off']:+.2%}",
            )
            for one in worst[:12]
        ],
    )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
