"""Traffic and time of fine-tuning with experts placed in several ways, over real links of limited bandwidth.

python benchmarks/expert_placement.py --output benchmarks/results/expert-placement-cpu-2-cores.json    # as root
python benchmarks/expert_placement.py --cases zipf-0.8 --slack 1 --rounds 2                # a part

Three network namespaces are nodes, with two workers each; what crosses between them goes over links that are a
sixteenth as fast as those within. The links are measured, the tasks' data is profiled, experts are placed by every
method, and methods take turns, a step at a time. Beside them stands the fewest bytes that any placement with a master
could send. The output is written after each case, beside the cases that it has already.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from namespaces import NamespacesRefused
from script import add_output, command_line, publish

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run by file path, from a checkout

ZIPF = {f"zipf-{skew}": skew for skew in (0.0, 0.4, 0.8, 1.2)}
TEXTS = ("movie", "austen")
CASES = (*TEXTS, *ZIPF)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    slots = "slots for each expert (1 1.25)"
    add("--slack", type=float, nargs="+", default=[1.0, 1.25], metavar="X", help=slots)
    upcycled = ROOT / ".quickstart/moe"
    add("--upcycled", type=Path, default=upcycled, metavar="DIR", help="see examples/moe/upcycle.py")
    add("--rounds", type=int, default=3, help="turns of each method, a step each (3)")
    add("--trace", type=int, default=30, metavar="N", help="steps of the longer run of each case (30)")
    add("--between", type=float, default=0.5, metavar="MB/S", help="bandwidth between nodes (0.5)")
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
    from expert_placement_bench import Bench
    from expert_placement_cluster import ProcessEnded
    from expert_placement_tables import draw, markdown

    output: Path | None = arguments.output
    before = json.loads(output.read_text()) if output is not None and output.is_file() else {}
    try:
        for result in Bench(arguments, before).measure():
            if output is not None:
                output.write_text(json.dumps(result, indent=1) + "\n")
    except NamespacesRefused as error:
        print(f"network namespaces need root and iproute2: {error}", file=sys.stderr)
        return 2
    except ProcessEnded as error:
        print(error, file=sys.stderr)
        return 1
    if output is not None:
        draw(result, output)
    publish(result, markdown(result), output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
