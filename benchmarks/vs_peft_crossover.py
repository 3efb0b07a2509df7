"""Speed-up over each rival by the sequences of a step: table and plot from several results of `vs_peft.py`.

python benchmarks/vs_peft_crossover.py 2.json 8.json 32.json --output crossover.json     # and .md and .svg beside it

All results must be of the same backbone, tasks and machine, and differ in `--sequences` and `--rival` only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plot
from script import add_output, command_line, measured_on, publish, table
from vs_peft_tables import RIVAL_NAMES, ranks_of, where

COLOURS = {"padded": "tab:blue", "packed": "tab:orange", "zero-padded": "tab:green"}
GOALS = {
    "packed": {2: 3.0, 8: 1.8, 32: 1.0},
    "padded": {2: 4.0, 8: 2.5, 32: 1.2},
    "zero-padded": {8: 1.5},
}
"""Speed-up on a GPU, with Llama-3-8B's shape in bf16, by the sequences in a step of each task."""
CEILING_GOAL = 1.18
"""Step over the frozen backbone alone, on a GPU."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="results of vs_peft.py")
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Publish the table and the plot; returns 2 if results are missing or cannot be compared."""
    arguments = parse(argv)
    missing = [file for file in arguments.results if not file.exists()]
    if missing:
        print("left out, not there:", *missing, file=sys.stderr)
    try:
        result = gather([json.loads(file.read_text()) for file in arguments.results if file not in missing])
    except ValueError as error:
        print(f"vs_peft_crossover.py: {error}", file=sys.stderr)
        return 2
    publish(result, markdown(result), arguments.output)
    if arguments.output is not None:
        draw(result, arguments.output.with_suffix(".svg"))
    return 0


def gather(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collect the speed-ups of several results.

    Returns:
        What the results have in common, and `points`: one for each rival and number of sequences, in order.

    Raises:
        ValueError: There is no result, the results are not of the same backbone, tasks and machine, or not all tasks
            of one have the same number of sequences.
    """
    if not results:
        raise ValueError("there is no result")
    common, *others = [_common(result) for result in results]
    if any(other != common for other in others):
        raise ValueError("the results are not of the same backbone, tasks, machine and versions")
    points = []
    for result in results:
        sequences = {task["sequences"] for task in result["mix"]}
        if len(sequences) > 1:
            raise ValueError("the tasks differ in their sequences: measure with --sequences N")
        part = result["all"]
        for rival, found in part["rivals"].items():
            points.append(
                {
                    "rival": rival,
                    "sequences": min(sequences),
                    "speedup": found["speedup"],
                    "rival_rate": part["tokens_per_second"][rival],
                    "rate": part["tokens_per_second"]["mux"],
                    "step_over_ceiling": part["step_over_ceiling"],
                }
            )
    names = list(RIVAL_NAMES)
    points.sort(key=lambda point: (names.index(point["rival"]), point["sequences"]))
    return {**common, "points": points}


def _common(result: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all results."""
    settings = {name: result["settings"][name] for name in ("backbone", "dtype", "lora", "liger", "device")}
    tasks = [{"max_length": task["max_length"], "rank": task["rank"]} for task in result["mix"]]
    return {
        "hardware": result["hardware"],
        "versions": result["versions"],
        "settings": settings,
        "tasks": tasks,
    }


def of_rivals(result: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """By rival, the sequences in a step of each task and the speed-up, in order."""
    found: dict[str, list[tuple[int, float]]] = {}
    for point in result["points"]:
        found.setdefault(point["rival"], []).append((point["sequences"], point["speedup"]))
    return found


def crossings(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """The sequences `from` which megatron-mux is faster, and `up to` which it is: where the speed-up crosses 1."""
    inverse = [(sequences, 1 / speedup) for sequences, speedup in points]
    found = {"from": plot.crossing(points), "up to": plot.crossing(inverse)}
    return {word: at for word, at in found.items() if at is not None}


def markdown(result: Mapping[str, Any]) -> str:
    """Render the table."""
    settings, goals = result["settings"], _goals(result)
    lengths = ", ".join(map(str, sorted({task["max_length"] for task in result["tasks"]})))
    lora = f"LoRA {ranks_of(result['tasks'])} on {', '.join(settings['lora']['targets'])}"
    lines = [
        measured_on(settings["backbone"], settings["dtype"], where(result), result["versions"]),
        f"{len(result['tasks'])} tasks of at most {lengths} tokens; {lora}.",
        "",
    ]
    rows = []
    for point in result["points"]:
        goal = goals.get(point["rival"], {}).get(point["sequences"])
        rows.append(
            (
                RIVAL_NAMES[point["rival"]],
                point["sequences"],
                f"{point['rival_rate']:.0f}",
                f"{point['rate']:.0f}",
                f"**{point['speedup']:.2f}x**" + (f" (goal {goal:.1f}x)" if goal else ""),
                f"{point['step_over_ceiling']:.3f}" + (f" (goal {CEILING_GOAL:.2f})" if goals else ""),
            )
        )
    lines += table(
        "rival (PEFT: one task at a time) | sequences in a step of each task | rival (tokens/s) | "
        "megatron-mux (tokens/s) | speed-up | step / frozen backbone alone",
        rows,
    )
    for rival, points in of_rivals(result).items():
        faster = " and ".join(f"{word} about {at:.0f} sequences" for word, at in crossings(points).items())
        faster = faster or ("at all of these points" if points[0][1] > 1 else "at none of these points")
        lines += ["", f"Faster than {RIVAL_NAMES[rival]}: {faster}."]
    return "\n".join(lines)


def _goals(result: Mapping[str, Any]) -> Mapping[str, Mapping[int, float]]:
    """Goals by rival and sequences; none but for the shape and data type that they are for, on a GPU."""
    settings = result["settings"]
    of_8b = settings["backbone"].startswith("llama3-8b") and settings["dtype"] == "bfloat16"
    return GOALS if of_8b and result["hardware"]["gpu"] else {}


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Plot the speed-up over each rival by the sequences of a step."""
    rivals = of_rivals(result)
    curves = [
        plot.Curve(f"over {RIVAL_NAMES[name]}", points, COLOURS[name]) for name, points in rivals.items()
    ]
    marked = [at for points in rivals.values() for at in crossings(points).values()]
    labels = (f"sequences in a step of each of {len(result['tasks'])} tasks", "speed-up")
    plot.draw(file, curves, labels, marked, level=1.0)


if __name__ == "__main__":
    sys.exit(main())
