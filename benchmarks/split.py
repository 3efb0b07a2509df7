"""Steps, memory and throughput of split fine-tuning, with clients over links of limited bandwidth.

python benchmarks/split.py --again --random --most-seconds 60 \
    --output benchmarks/results/split-cpu-2-cores.json                               # as root, 21 minutes
python benchmarks/split.py --parts steps --policies on-demand preserve --clients 1 4 # a part of it
python benchmarks/split.py --parts memory                                            # needs no namespaces

steps: a server and clients, each in a network namespace with a link of its own to the server's; per policy and number
of clients, the time of an optimizer step and what it went to (Menos, Tables 1 to 3). ranks: the same for on-demand with
the body on one rank and on two (Figure 10). together: throughput of a saturated server with and without co-batching.
memory: persistent memory against a copy of the body for each client, and equation 3 against counted bytes. The output
is written after each case; what it has already is not measured again without --again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from namespaces import NamespacesRefused
from script import add_output, command_line, publish

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("preserve", "reforward-with-gradients", "on-demand", "auto")
"""The second is none of the server's: `split_worker.py` has it, to compare with."""
PARTS = ("steps", "ranks", "together", "memory")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=list(POLICIES),
        metavar="NAME",
        help=", ".join(POLICIES),
    )
    add("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="N", help="(1 2 4 8 16)")
    add("--bandwidth", type=float, default=0.4, metavar="MB/S", help="of each client's link (0.4)")
    add("--steps", type=int, default=6, help="of each client, after its first (6)")
    add("--most-seconds", type=float, default=30.0, metavar="S", help="longest measurement of a case (30)")
    add("--hidden", type=int, default=384, help="of the random Llama (384)")
    add("--layers", type=int, default=5, help="of it; the client has the first (5)")
    add("--requesters", type=int, default=8, metavar="N", help="together: clients (8)")
    add("--sizes", nargs="+", type=int, default=[16, 32, 64, 128, 256], metavar="N", help="together: tokens")
    add("--rounds", type=int, default=3, help="together: turns of each server (3)")
    add("--turn-seconds", type=float, default=4.0, metavar="S", help="together: length of a turn (4)")
    add("--random", action="store_true", help="together: with the random Llama, not --backbone")
    add("--sessions", type=int, default=8, metavar="N", help="memory: clients (8)")
    add("--backbone", type=Path, default=ROOT / ".quickstart/backbone", metavar="DIR",
        help="of the parts together and memory (the quickstart's)")  # fmt: skip
    add("--work", type=Path, metavar="DIR", help="keep the random Llama here for later calls")
    add("--again", action="store_true", help="measure also what the output has already")
    add("--json", action="store_true", help="print JSON instead of tables")
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish; returns 1 if a process ended early, 2 if something that is needed is missing."""
    arguments = parse(argv)
    needs = {"memory"} | ({"together"} if not arguments.random else set())
    if needs & set(arguments.parts) and not (arguments.backbone / "config.json").is_file():
        print(
            f"--backbone {arguments.backbone}: there is no model: run examples/quickstart first",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    from split_bench import OtherSetup, measure
    from split_processes import ProcessEnded

    try:
        result = measure(arguments)
    except OtherSetup as error:
        print(error, file=sys.stderr)
        return 2
    except NamespacesRefused as error:
        print(f"network namespaces need root and iproute2: {error}", file=sys.stderr)
        return 2
    except ProcessEnded as error:
        print(error, file=sys.stderr)
        return 1
    from split_tables import markdown

    publish(result, markdown(result), arguments.output, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
