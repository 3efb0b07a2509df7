"""Traffic and time of fine-tuning with experts placed in several ways, over real links of limited bandwidth.

python benchmarks/expert_placement.py --output benchmarks/results/expert-placement-cpu-2-cores.json    # as root
python benchmarks/expert_placement.py --cases zipf-0.8 --slack 1 --rounds 2                # a part
python benchmarks/expert_placement.py --work DIR --parts prepare                           # needs no idle machine
python benchmarks/expert_placement.py --work DIR --parts measure --output FILE --cases movie --slack 1    # does
python benchmarks/expert_placement.py --work DIR --parts trace --output FILE               # does not
python benchmarks/expert_placement.py --work DIR --parts predict --output FILE             # does not

Three network namespaces are nodes, with two workers each; what crosses between them goes over links that are a
sixteenth as fast as those within. The links are measured, the tasks' data is profiled, experts are placed by every
method, and methods take turns, some steps at a time. Beside them stands the fewest bytes that any placement with a
master could send. The output is written after each case; what it has already is not measured again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from expert_placement_results import CASES, ROOT, TEXTS
from namespaces import NamespacesRefused
from script import add_output, command_line, publish

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

PARTS = ("prepare", "measure", "trace", "predict")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    add(
        "--slack",
        type=float,
        nargs="+",
        default=[1.0, 1.25],
        metavar="X",
        help="slots for each expert (1 1.25)",
    )
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all, and what they need")
    add(
        "--upcycled",
        type=Path,
        default=ROOT / ".quickstart/moe",
        metavar="DIR",
        help="see examples/moe/upcycle.py",
    )
    add("--rounds", type=int, default=3, help="turns of each method (3)")
    add("--steps", type=int, default=1, help="steps in each turn (1)")
    add("--trace", type=int, default=30, metavar="N", help="steps of the longer run of each case (30)")
    add("--between", type=float, default=0.5, metavar="MB/S", help="bandwidth between nodes (0.5)")
    add("--local", type=float, default=16.0, metavar="X", help="times that bandwidth within a node (16)")
    add("--work", type=Path, metavar="DIR", help="keep models, records and profiles here for later calls")
    add("--again", action="store_true", help="measure also what the output has already")
    add("--json", action="store_true", help="print JSON instead of tables")
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish; returns 1 if a process ended early, 2 if what is needed is missing or does not fit."""
    arguments = parse(argv)
    if set(arguments.cases) & set(TEXTS) and not (arguments.upcycled / "config.json").is_file():
        print(
            f"--upcycled {arguments.upcycled}: there is no model: make it with "
            f"examples/moe/upcycle.py --output {arguments.upcycled}, or choose --cases zipf-...",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    from expert_placement_bench import measure
    from expert_placement_cluster import ProcessEnded

    try:
        result = measure(arguments)
    except NamespacesRefused as error:
        print(f"network namespaces need root and iproute2: {error}", file=sys.stderr)
        return 2
    except ProcessEnded as error:
        print(error, file=sys.stderr)
        return 1
    if not result["cases"]:  # only prepared so far
        return 0
    from expert_placement_tables import draw, markdown

    if arguments.output is not None:
        draw(result, arguments.output)
    publish(result, markdown(result), arguments.output, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
