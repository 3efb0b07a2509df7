"""Count which experts the records of tasks select, for the placement of experts.

    megatron-mux profile-experts --backbone DIR --tasks tasks.yaml --output profile.json --picture experts.svg

    megatron-mux profile-experts --backbone DIR --tasks tasks.yaml --output profile.json --drift-steps 300

The records pass through the frozen model once, without adapters. The profile says, for each layer with experts, how
often tokens select each expert (of all tasks together and of each by itself), the sums of their scores, and which
experts they select together. megatron-mux place-experts reads it. With --drift-steps the tasks are then trained for so
many steps, their adapters thrown away, to see how the choice of experts drifts, beside the bound of VELA's Theorem 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_mux.arguments.flag import COUNT, FILE, MODEL
from megatron_mux.arguments.parser import BACKBONE, Parser
from megatron_mux.arguments.values import flag_of
from megatron_mux.cli.launch import run_here
from megatron_mux.errors import UserError, to_stderr

if TYPE_CHECKING:
    from rich.progress import Progress

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.engine import Task
    from megatron_mux.runtime import Parallel

PROGRAM = "megatron-mux profile-experts"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--backbone", **MODEL, required=True, help=f"{BACKBONE}; with experts")
    add("--tasks", **FILE, required=True, help="task file")
    add("--output", **FILE, required=True, help="where the profile goes")
    add("--picture", **FILE, help="heat maps of the profile, as SVG")
    add("--tokens", **COUNT, default=65536, help="tokens of each task at most (65536)")
    add(
        "--drift-steps",
        **COUNT,
        help="train the tasks for N steps, follow the drift of the routers' scores, and add it to the profile",
    )
    add("--drift-picture", **FILE, help="access over steps, drift and its bound, as SVG")
    add("--bf16", action="store_true", help="compute in bfloat16 (default: fp32)")
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Count and write; returns 2 if the input is wrong."""
    return run_here(lambda: run(build_parser(program).parse_args(argv)), program)


def run(arguments: argparse.Namespace) -> None:
    """Count and write, with a parsed command line."""
    import torch

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import read_backbone_info
    from megatron_mux.data.dataset import DataFiles
    from megatron_mux.data.tokenizer import load_tokenizer
    from megatron_mux.files import write_output
    from megatron_mux.moe.heat_map import draw_heat_maps
    from megatron_mux.moe.profile_tasks import profile_tasks
    from megatron_mux.runtime import initialize
    from megatron_mux.tasks import load_task_file
    from megatron_mux.training.task_setup import open_tasks

    info = read_backbone_info(arguments.backbone)
    if info.shape.experts is None:
        raise UserError(f"--backbone {arguments.backbone}: a {info.shape.family} has no experts to profile")
    if arguments.drift_picture is not None and arguments.drift_steps is None:
        raise UserError(f"--drift-picture {arguments.drift_picture}: needs --drift-steps")
    outputs = ("output", "picture", "drift_picture")
    for flag, file in ((flag_of(name), getattr(arguments, name)) for name in outputs):
        if file is not None and not file.parent.is_dir():
            raise UserError(f"{flag} {file}: there is no directory {file.parent}: create it first")
    specs = load_task_file(arguments.tasks, data_later=True)
    tasks = open_tasks(specs, info, DataFiles(load_tokenizer(info.tokenizer), to_stderr), to_stderr)
    parallel = initialize()
    backbone = Backbone.load(
        arguments.backbone, parallel, torch.bfloat16 if arguments.bf16 else torch.float32
    )
    records = {task.spec.name: task.data for task in tasks}
    total = sum(min(arguments.tokens, int(data.lengths.sum())) for data in records.values())
    with _progress() as bar:
        counted = bar.add_task("tokens", total=total)
        profile = profile_tasks(
            backbone, records, arguments.tokens, lambda count: bar.advance(counted, count)
        )
    content = profile.model_dump(mode="json")
    if arguments.drift_steps is not None:
        content["drift"] = _follow_drift(arguments, backbone, parallel, tasks)
    write_output("--output", arguments.output, json.dumps(content) + "\n")
    if arguments.picture is not None:
        write_output("--picture", arguments.picture, draw_heat_maps(profile))
    print(f"{profile.tokens} tokens counted: {arguments.output}")


def _follow_drift(
    arguments: argparse.Namespace, backbone: Backbone, parallel: Parallel, tasks: list[Task]
) -> dict[str, Any]:
    """Train the tasks, say what became of the scores, and draw it if asked for."""
    from megatron_mux.engine import Engine, Planning
    from megatron_mux.files import write_output
    from megatron_mux.moe.drift_picture import draw_drift
    from megatron_mux.training.expert_drift import follow_drift

    with _progress() as bar:
        steps = bar.add_task("steps", total=arguments.drift_steps)
        engine = Engine(backbone, parallel, Planning("spatial", 1))
        changes = follow_drift(engine, tasks, arguments.drift_steps, lambda: bar.advance(steps))
        engine.close()
    for name, task in changes.items():
        last = task["steps"][-1]["layers"] if task["steps"] else []
        drift = max((layer["mean"] for layer in last), default=0.0)
        said = f"{name}: {len(task['steps'])} steps of {task['optimizer']}; in the last one scores drift by {drift:.3g}"
        said += f" on average in the layer that drifts most; {task['violations']} of {task['compared']} scores changed"
        said += " by more than the bound by the update's norm"
        if task["paper_compared"]:
            said += f", {task['paper_violations']} by more than Theorem 1's"
        print(said)
    if arguments.drift_picture is not None:
        write_output("--drift-picture", arguments.drift_picture, draw_drift(changes))
    return changes


def _progress() -> Progress:
    """A progress bar on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
