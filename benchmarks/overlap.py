"""Messages of tensor ranks hidden behind other tasks' computation, over a link of limited bandwidth.

python benchmarks/overlap.py                        # as root: two and four tasks, at two bandwidths: ten minutes
python benchmarks/overlap.py --tasks 4 --share 0.5 --turns 7 --json
python benchmarks/overlap.py --no-namespaces --backbone-shape tiny --tasks 2 --turns 1   # bits only

Two ranks, a core each, in two network namespaces. The link between them is limited so that messages take a given share
of a step that computes one task after another. The same step is computed in several ways, in turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from namespaces import NamespacesRefused, measure_in_namespaces
from processes import add_worker_flag, run_in_processes
from script import add_output, command_line, measured_on, publish, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run by file path, from a checkout
_FLAGS = ("--tasks", "--share", "--turns", "--tokens", "--backbone-shape", "--no-namespaces")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument(
        "--share",
        type=float,
        nargs="+",
        default=[1 / 3, 1 / 2],
        metavar="C",
        help="share of a step that messages take when nothing hides them",
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens in a step of all tasks, about")
    parser.add_argument("--backbone-shape", default="wide", help="shape of the random backbone")
    parser.add_argument(
        "--no-namespaces", action="store_true", help="over the loopback device, which nothing limits"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_worker_flag(parser)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in two processes and publish; returns 2 if there can be no namespaces."""
    arguments = parse(argv)
    if arguments.no_namespaces or arguments.worker is not None:
        result = run_in_processes(arguments, 2, __file__, _FLAGS, _measure)
    else:
        try:
            result = measure_in_namespaces(arguments, __file__, _FLAGS)
        except NamespacesRefused as error:
            print(f"network namespaces need root and iproute2: {error}", file=sys.stderr)
            return 2
    if result is not None:
        if arguments.output is not None and not arguments.no_namespaces:
            arguments.output.with_suffix(".svg").write_text(result["cases"][-1]["picture"])
        for case in result["cases"]:
            del case["picture"]
        publish(result, markdown(result), arguments.output, arguments.json)
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from overlap_worker import measure  # it imports torch

    return measure(arguments)


def markdown(result: dict[str, Any]) -> str:
    """Render the tables."""
    from overlap_sides import SIDES

    lines = [
        measured_on(result["backbone"], result["dtype"], result["hardware"], result["versions"]),
        _setup(result),
    ]
    for case in result["cases"]:
        lines += ["", _heading(case), ""]
        rows: list[Sequence[object]] = []
        for side, what in SIDES.items():
            if side not in case["median_s"]:
                continue
            taken, said = case["median_s"][side], case["predicted_s"].get(side)
            equal = case["predicted_at_this_speed_s"].get(side, 0.0) / taken - 1
            rows.append(
                (
                    f"({side}) {what}",
                    f"{taken:.3f}",
                    f"{case['speed_up'][side]:.3f}x{_goal(side, case['share'])}",
                    f"{case['median_cpu_s'][side]:.3f}",
                    "" if said is None else f"{said:.3f} ({said / taken - 1:+.1%})",
                    "" if said is None else f"{equal:+.1%}",
                )
            )
        lines += table(
            "side | seconds | over (a) | CPU seconds of a rank | simulated before | at equal speed", rows
        )
    same = all(case["adapters_equal"] and case["messages_equal"] for case in result["cases"])
    said = "came out alike to the bit" if same else "DIFFER"
    lines += [
        "",
        "At equal speed: (f) and (g) taken as long as they took in the turns, not as in the profile.",
        "",
        f"Adapters of tasks one after another and in turns after two steps, and the messages of both ranks: {said}.",
        "",
    ]
    return "\n".join(lines)


def _setup(result: dict[str, Any]) -> str:
    return (
        f"Two tensor ranks, one core each; LoRA r=8 on q and v; about {result['tokens']} tokens in a step; medians of "
        f"{result['turns']} turns."
    )


def _heading(case: dict[str, Any]) -> str:
    from overlap_sides import GOALS

    link = "loopback" if case["share"] is None else f"a link of {case['megabits_per_s']:.0f} Mbit/s"
    slower = f"slow computation beside them by {case['taken_from_computation']:.0%}"
    return (
        f"**{case['tasks']} tasks, {link}**: {case['messages']} messages of {case['megabytes']:.1f} MB take "
        f"{case['share_of_messages']:.1%} of a step, and {slower}. Bound "
        f"{case['bound']:.3f}x ({case['bound_with_kernel']:.3f}x with what slows computation); (e), "
        f"{case['ours']}, reaches {case['of_bound']:.1%} of it (goal {GOALS['of_bound']:.0%}), and "
        f"{case['over_best_of_others']:.3f} of the best of the others (goal {GOALS['over_best_of_others']}). Predicted "
        f"fastest: ({case['predicted_fastest']}), which reaches {case['predicted_fastest_over_best']:.3f} of the best."
    )


def _goal(side: str, share: float | None) -> str:
    from overlap_sides import GOALS

    if side != "e" or share is None:
        return ""
    return next((f" (goal {goal})" for least, goal in GOALS["speed_up"] if share > least - 0.01), "")


if __name__ == "__main__":
    sys.exit(main())
