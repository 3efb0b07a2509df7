"""Draw a plan's simulated schedule and the one that a run has measured, or the subgraphs of a backbone's layers.

    megatron-mux draw --plan plan.json
    megatron-mux draw --plan plan.json --measured DIR/schedule.json --output both.svg --trace both.json
    megatron-mux draw DIR    # of a run, or of one of its tasks
    megatron-mux draw --subgraphs --backbone DIR --tensor-parallel 2
    megatron-mux draw --subgraphs --plan plan.json    # of megatron-mux plan --subgraphs

Both schedules have the same scale. Below them are the first layers of passes that have a launch order: pieces and
messages of a stage over time. The plan comes from megatron-mux plan --output FILE, or from a run's --save DIR, which
also has schedule.json. The trace is for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mux.arguments.flag import FILE, MODEL
from megatron_mux.arguments.parser import BACKBONE, Parser, add_path
from megatron_mux.arguments.values import at_least
from megatron_mux.errors import UserError, exit_status
from megatron_mux.saved_files import run_of_task

if TYPE_CHECKING:
    from megatron_mux.fusion.graphs.subgraphs import LayerSubgraphs
    from megatron_mux.fusion.plan import Plan
    from megatron_mux.pipeline.action import TimedAction

_HOW_TO_PLAN = (
    "make a plan with megatron-mux plan --backbone DIR --tasks tasks.yaml --output plan.json, or use that of a run "
    "with --mux-policy auto"
)

PROGRAM = "megatron-mux draw"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--plan", **FILE, help="plan.json, with predicted costs")
    add("--measured", **FILE, help="a run's schedule.json")
    add_path(parser, "--run", "DIR", "take both from a run's --save DIR")
    add("--output", **FILE, help="the picture (schedule.svg, in the run's DIR with --run)")
    add("--trace", **FILE, help="for Perfetto (schedule.trace.json, likewise)")
    add("--json", action="store_true", help="print JSON instead of a table")
    add = parser.add_argument_group("subgraphs between messages").add_argument
    add(
        "--subgraphs",
        action="store_true",
        help="draw one layer of each kind instead of a schedule: as a plan keeps it, or traced with --backbone",
    )
    add("--backbone", **MODEL, help=f"{BACKBONE}; only its config.json is read")
    add("--tensor-parallel", type=at_least(2), default=2, metavar="N", help="ranks that share each layer (2)")
    add("--sequence-parallel", action="store_true", help="they divide the rows between attention and MLP")
    add("--rows", type=at_least(2), default=512, metavar="T", help="tokens of the micro-batch (512)")
    add("--lora-rank", type=at_least(1), default=16, metavar="R", help="of a LoRA on all linear modules (16)")
    add(
        "--device", default="cpu", metavar="NAME", help="predict seconds for cpu, or a GPU such as H100 (cpu)"
    )
    add("--bf16", action="store_true", help="the backbone in bfloat16 (default: fp32)")
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Simulate, draw and print; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser(program).parse_args(argv)), program)


def run(arguments: argparse.Namespace) -> None:
    """Simulate, draw and print, with a parsed command line."""
    if arguments.run is not None:
        arguments.run = run_of_task(arguments.run) or arguments.run
    directory = arguments.run or Path()
    picture = "subgraphs.svg" if arguments.subgraphs and arguments.run else "schedule.svg"
    arguments.output = arguments.output or directory / picture
    arguments.trace = arguments.trace or directory / "schedule.trace.json"
    if arguments.subgraphs:
        draw_subgraphs(arguments)
        return
    plan_file, trace_file = _sources(arguments)

    from megatron_mux.files import write_output
    from megatron_mux.fusion.check import read_plan
    from megatron_mux.pipeline.draw import to_svg
    from megatron_mux.pipeline.trace import to_trace

    plan = None if arguments.run is None or trace_file is None else timed_plan(trace_file)
    if plan is None:
        plan = read_plan(plan_file)
    if not plan.buckets:
        raise UserError(f"{plan_file}: has no buckets, so there is nothing to draw: {_HOW_TO_PLAN}")
    schedules: dict[str, Sequence[TimedAction]] = {}
    steps = 1
    if trace_file is not None:
        actions = measured(trace_file, plan)
        steps = steps_of(actions, plan)
        schedules["measured"] = actions
    # The simulated schedule comes first, with as many steps as were measured.
    schedules = {"simulated": simulated(plan, plan_file, steps), **schedules}
    for note in _differences(plan, schedules.get("measured")):
        print(f"note: {trace_file}: {note}", file=sys.stderr)
    title = f"{plan.policy}, {plan.stages} stage(s), {len(plan.buckets)} bucket(s), {steps} step(s)"
    write_output("--output", arguments.output, to_svg(schedules, title, ranks=plan.ranks))
    write_output("--trace", arguments.trace, to_trace(schedules, plan.ranks, plan.to_json()))
    values = figures(plan, schedules, steps)
    if arguments.json:
        print(json.dumps({**values, "output": str(arguments.output), "trace": str(arguments.trace)}))
        return
    _print(values)
    print(f"drawn in {arguments.output}; for Perfetto: {arguments.trace}")


def draw_subgraphs(arguments: argparse.Namespace) -> None:
    """Draw and print the subgraphs of one layer of each kind: a plan's, or traced in a fake world of tensor ranks."""
    from megatron_mux.files import write_output
    from megatron_mux.fusion.graphs.subgraph_picture import to_svg

    traced = _traced(arguments) if arguments.backbone is not None else _kept(arguments)
    write_output("--output", arguments.output, to_svg(traced))
    if arguments.json:
        print(json.dumps(list(map(asdict, traced))))
        return
    print("\n".join(map(str, traced)))
    print(f"drawn in {arguments.output}")


def _kept(arguments: argparse.Namespace) -> Sequence[LayerSubgraphs]:
    from megatron_mux.fusion.check import read_plan

    if arguments.plan is None and arguments.run is None:
        raise UserError(
            "--subgraphs: needs --backbone DIR, or a plan that keeps them: --plan FILE or --run DIR"
        )
    file, _ = _sources(arguments)
    plan = read_plan(file)
    if not plan.layers:
        raise UserError(f"{file}: keeps no subgraphs: trace them with --backbone DIR")
    return plan.layers


def _traced(arguments: argparse.Namespace) -> Sequence[LayerSubgraphs]:
    import torch

    from megatron_mux.backbone.registry import info_without_weights
    from megatron_mux.dry_run.layer_subgraphs import SubgraphQuestion, subgraphs_of
    from megatron_mux.fusion.profiler.profile_store import about_run, find_profile
    from megatron_mux.gpus import known

    if arguments.device != "cpu":
        known(arguments.device, "cpu")
    info = info_without_weights(arguments.backbone)
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    ranks = arguments.tensor_parallel
    about = about_run(info.shape, arguments.device, dtype, ranks, threads=1, busy=ranks)
    profile = find_profile(info.shape, about)
    return subgraphs_of(
        SubgraphQuestion(
            info, profile, dtype, arguments.sequence_parallel, arguments.rows, arguments.lora_rank
        )
    )


def _sources(arguments: argparse.Namespace) -> tuple[Path, Path | None]:
    """Return the files of the plan and of the measured schedule, and check that no output overwrites them."""
    plan, measured = arguments.plan, arguments.measured
    if arguments.run is not None:
        if plan is not None or measured is not None:
            raise UserError("--run: replaces --plan and --measured: leave them out")
        plan, measured = arguments.run / "plan.json", arguments.run / "schedule.json"
    if plan is None:
        raise UserError("--plan FILE or --run DIR: one of them is needed")
    for flag, file in (("--output", arguments.output), ("--trace", arguments.trace)):
        if file.resolve() in {source.resolve() for source in (plan, measured) if source is not None}:
            raise UserError(f"{flag} {file}: is an input: choose another file")
    if arguments.output.resolve() == arguments.trace.resolve():
        raise UserError(f"--trace {arguments.trace}: is the same file as --output: choose another file")
    return plan, measured


def simulated(plan: Plan, file: Path, steps: int) -> list[TimedAction]:
    """Simulate steps of typical lengths with the plan's predicted costs, on its first pipeline.

    Raises:
        UserError: The plan has no costs, or is inconsistent.
    """
    from megatron_mux.fusion.check import check_plan
    from megatron_mux.fusion.predicted_interleaving import with_interleaving
    from megatron_mux.fusion.step import bucket_costs, step_template
    from megatron_mux.pipeline.simulate import simulate

    without = [str(b) for b, bucket in enumerate(plan.buckets) if not (bucket.forward and bucket.backward)]
    if without:
        raise UserError(f"{file}: has no predicted costs for bucket {', '.join(without)}: {_HOW_TO_PLAN}")
    try:  # against its own backbone and ranks, which are irrelevant for drawing
        check_plan(plan, plan.backbone, plan.mesh, plan.tasks)
    except UserError as error:
        raise UserError(*(f"{file}: {problem}" for problem in error.problems)) from error
    sizes = [bucket.chunks or (1,) * bucket.micro_batches for bucket in plan.buckets] * steps
    costs = [bucket_costs(bucket) for bucket in plan.buckets]
    schedule = simulate(
        step_template(plan, sizes), costs, [bucket.label for bucket in plan.buckets], sizes=sizes
    )
    return with_interleaving((timed for stage in schedule.timed for timed in stage), plan)


def measured(file: Path, plan: Plan) -> list[TimedAction]:
    """Read the schedule that a run has measured, from its `schedule.json`.

    Raises:
        UserError: The file is not such a schedule, or has another number of stages than the plan.
    """
    from megatron_mux.pipeline.trace import from_trace

    try:
        schedules = from_trace(file.read_text())
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: is no JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: {error}") from error
    # Runs write the schedule without a name, this tool writes it by name.
    actions = schedules.get("measured", schedules.get("", []))
    if not actions:
        raise UserError(f"{file}: has no measured actions: give a run's schedule.json")
    stages = max(timed.action.stage for timed in actions) + 1
    if stages != plan.stages:
        raise UserError(
            f"{file}: has {stages} stage(s), but the plan has {plan.stages}: they belong to different runs"
        )
    return actions


def timed_plan(file: Path) -> Plan | None:
    """Read the plan that the timed steps of a run followed: plan.json is its last one, often with fewer tasks.

    Returns:
        None if `file` cannot be read or has no plan.

    Raises:
        UserError: The plan is of an earlier format.
    """
    from megatron_mux.fusion.plan import Plan

    try:
        plan = json.loads(file.read_text()).get("plan")
        return None if plan is None else Plan.from_json(plan)
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    except UserError as error:
        raise UserError(*(f"{file}: {problem}" for problem in error.problems)) from error


def steps_of(actions: Sequence[TimedAction], plan: Plan) -> int:
    """Return the number of measured steps; bucket indices continue from step to step."""
    steps, left = divmod(len({timed.action.bucket for timed in actions}), len(plan.buckets))
    return 1 if left else steps  # with a remainder, the run had another plan then


def _differences(plan: Plan, actions: Sequence[TimedAction] | None) -> Iterator[str]:
    """Yield notes on tasks that only the plan or only the measured schedule has, since tasks join and leave a run."""
    from megatron_mux.pipeline.draw import tasks_of

    if actions is None:
        return
    seen = {task for timed in actions for task in tasks_of(timed.label)}
    for kind, names in (
        ("has tasks that the plan lacks", seen - set(plan.tasks)),
        ("lacks tasks of the plan", set(plan.tasks) - seen),
    ):
        if names:
            yield f"{kind}: {', '.join(sorted(names))}"


def figures(plan: Plan, schedules: Mapping[str, Sequence[TimedAction]], steps: int) -> dict[str, Any]:
    """Return the figures to print as JSON: seconds of all steps, and bubbles as shares of a schedule's latency.

    `predicted_latency_s` is the plan's own prediction for one step, including overheads outside its passes.
    """
    from megatron_mux.pipeline.draw import bubble, busy, latency

    stages: list[dict[str, Any]] = [{"stage": stage} for stage in range(plan.ranks)]
    for name, actions in schedules.items():
        for row, seconds, idle in zip(
            stages, busy(actions, plan.ranks), bubble(actions, plan.ranks), strict=True
        ):
            row[name] = {"busy_s": seconds, "bubble": idle}
    seconds_of = {f"{name}_latency_s": latency(actions) for name, actions in schedules.items()}
    return {"stages": stages, "steps": steps, "predicted_latency_s": plan.predicted_latency_s, **seconds_of}


def _print(values: Mapping[str, Any]) -> None:
    """Print the figures as a table, and the predicted next to the measured latency."""
    from rich.table import Table

    from megatron_mux.console import make_console

    names = [name for name in ("simulated", "measured") if f"{name}_latency_s" in values]
    table = Table(title=f"{values['steps']} step(s) of the pipeline")
    table.add_column("stage", justify="right")
    for name in names:
        table.add_column(f"{name} busy s", justify="right")
        table.add_column("bubble %", justify="right")
    for row in values["stages"]:
        cells = [(f"{row[name]['busy_s']:.4g}", f"{row[name]['bubble']:.1%}") for name in names]
        table.add_row(str(row["stage"]), *(text for pair in cells for text in pair))
    console = make_console()
    console.print(table)
    simulated, predicted = values["simulated_latency_s"], values["predicted_latency_s"]
    whole = (
        ""
        if predicted is None
        else f" (the plan predicts {predicted:.4g} s a step, including overheads outside its passes)"
    )
    console.print(f"predicted latency: {simulated:.4g} s{whole}", soft_wrap=True)
    if "measured" in names:
        seconds = values["measured_latency_s"]
        times = f": {seconds / simulated:.2f}x the predicted one" if simulated else ""
        console.print(f"measured latency: {seconds:.4g} s{times}")
