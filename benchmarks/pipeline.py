"""A two-stage pipeline: many tasks with rolling steps against Megatron-Core's own 1F1B, one task at a time.

python benchmarks/pipeline.py                       # a random Llama, a core to a stage, six tasks: ten minutes
python benchmarks/pipeline.py --output result.json  # the JSON, and the tables as result.md
python benchmarks/pipeline.py --picture docs/schedule.svg  # a step of the first case, by both, on one time axis

All sides train the same tasks, adapters, optimizers and records on the same stages, in turns and in the same two
processes; tokens per second do not count padding. In "same shapes" every record is as long as its task's `max_length`,
so nothing is padded on any side. In "padded" records are shorter: for Megatron-Core's schedule, whose micro-batches
have one shape, they are padded to their task's `max_length`; ours are packed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline_cases import CASES, LENGTHS
from processes import add_worker_flag, run_in_processes
from script import add_output, command_line, measured_on, median_ratio, publish, table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--backbone-shape",
        default="mid",
        help="shape of the random backbone (mid; tiny to try the script out)",
    )
    parser.add_argument("--turns", type=int, default=5)
    every = range(1, 1 + len(CASES))
    parser.add_argument(
        "--cases", type=int, nargs="+", choices=every, default=[*every], help="run only these (default: all)"
    )
    parser.add_argument("--steps", type=int, help="steps in a turn (default: those of each case)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="only draw a step of the first case, simulated from measured passes",
    )
    add_worker_flag(parser)
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.picture is not None and arguments.device != "cpu":
        parser.error("--picture: takes the processor's time, so it is for --device cpu")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in two processes and publish."""
    arguments = parse(argv)
    flags = ("--turns", "--cases", "--steps", "--device", "--backbone-shape", "--picture")
    result = run_in_processes(arguments, 2, __file__, flags, _measure)
    if result is not None and arguments.picture is not None:
        arguments.picture.write_text(_picture(result["trace"]))
    elif result is not None:
        publish(result, markdown(result), arguments.output)
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from pipeline_worker import measure  # it imports torch

    return measure(arguments)


def _picture(trace: str) -> str:
    from megatron_mux.pipeline.draw import to_svg
    from megatron_mux.pipeline.trace import from_trace

    return to_svg(
        from_trace(trace),
        f"One optimizer step of {len(LENGTHS)} LoRA tasks on two pipeline stages, simulated from measured pass times",
    )


def markdown(result: dict[str, Any]) -> str:
    """Render the tables."""
    tasks = ", ".join(str(length) for length in result["lengths"])
    stages = "+".join(map(str, result["split"]))
    setup = (
        f"Two stages of {stages} layers, one process and core each; tasks of max_length {tasks}, LoRA r=8 on q and v, "
        f"micro-batches of {result['tokens']} tokens; medians of {result['turns']} turns."
    )
    lines = [
        measured_on(result),
        setup,
        "",
    ]
    rows: list[Sequence[object]] = []
    for case in result["cases"]:
        seconds = case["seconds"]
        rate = {side: case["tokens"] / statistics.median(own) for side, own in seconds.items()}
        rows += [
            (
                f"{case['records']}, {case['micro_batches']}",
                side,
                f"{rate[side]:.0f}",
                f"{median_ratio(seconds['megatron'], seconds[side]):.3f}x" + _goal(case["goal"], side),
                f"{median_ratio(seconds['spatial'], seconds[side]):.3f}x" + _goal(case["over_spatial"], side),
                " ".join(f"{share:.1%}" for share in case["bubble"][side]) if side in case["bubble"] else "",
                f"{case['simulated'][side]:.3f}" if side in case["simulated"] else "",
            )
            for side in seconds
        ]
    lines += table(
        "records, micro-batches of a task | side | tokens/s | over Megatron-Core's 1F1B | over spatial | "
        "bubble of each stage | simulated / measured",
        rows,
    )
    same = [case["largest_loss_difference"] for case in result["cases"]]
    lines += ["", f"Largest relative difference of a task's loss between sides: {max(same):.1e}.", ""]
    return "\n".join(lines)


def _goal(goal: float | None, side: str) -> str:
    return f" (goal {goal:.2f})" if goal and side in ("temporal", "auto") else ""


if __name__ == "__main__":
    sys.exit(main())
