"""Plan how tasks share a backbone: hybrid tasks, buckets, micro-batches and chunks.

    megatron-mux plan --backbone DIR --tasks tasks.yaml
    megatron-mux plan --backbone DIR --tasks tasks.yaml --stages 2 --memory-limit 40GiB --output plan.json
    megatron-mux plan --backbone DIR --tasks tasks.yaml --gpus 8 --device H100

No weights are read. Predictions use the profile of megatron-mux profile if there is one for this backbone, device
and tensor-parallel size, else a roofline of the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from shlex import quote
from typing import TYPE_CHECKING, Any

from megatron_mux.arguments.flag import COUNT, DIRECTORY, FILE, MODEL
from megatron_mux.arguments.model import in_bf16
from megatron_mux.arguments.parser import BACKBONE, Parser, add_path
from megatron_mux.arguments.values import at_least, auto_or_none, size
from megatron_mux.errors import UserError, exit_status, to_stderr
from megatron_mux.hub_cache import shown_model

if TYPE_CHECKING:
    from megatron_mux.fusion.mesh import Mesh
    from megatron_mux.fusion.plan import Plan
    from megatron_mux.fusion.planner.load import TaskLoad
    from megatron_mux.fusion.planner.planner import Planner
    from megatron_mux.fusion.planner.planning_context import PlanningContext
    from megatron_mux.fusion.profiler.profile import Profile
    from megatron_mux.tasks import TaskFile


_DEGREES = (
    "stages", "tensor_parallel", "data_parallel", "expert_parallel", "expert_tensor_parallel", "expert_managers",
)  # fmt: skip

PROGRAM = "megatron-mux plan"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--backbone", **MODEL, required=True, help=BACKBONE)
    add_path(parser, "--tasks", "FILE", "tasks.yaml", required=True)
    add("--stages", type=at_least(1), metavar="S", help="pipeline stages (1)")
    add("--virtual-stages", type=at_least(1), default=1, metavar="V", help="pipeline stages per rank (1)")
    add("--tensor-parallel", **COUNT, help="ranks that share each layer (1)")
    add("--data-parallel", **COUNT, help="data-parallel pipelines (1)")
    add("--expert-parallel", **COUNT, help="ranks that experts are divided among (1)")
    add(
        "--expert-tensor-parallel",
        **COUNT,
        help="ranks that share each expert (default: as many as share each layer)",
    )
    add(
        "--expert-managers",
        **COUNT,
        help="processes that hold the experts and nothing else, as --mux-expert-managers (none)",
    )
    add("--gpus", **COUNT, help="choose stages, tensor, data and expert parallelism for N ranks")
    _add_run_flags(parser)
    add(
        "--device",
        metavar="NAME",
        help="cpu, cuda, or a GPU of another machine such as H100 (default: this machine's)",
    )
    add(
        "--threads",
        **COUNT,
        help="threads per rank on a CPU (default: torch's; 1 if there are several ranks)",
    )
    add("--profiles", **DIRECTORY, help="where profiles are kept (default: the user's cache)")
    add(
        "--subgraphs",
        action="store_true",
        help="keep the subgraphs of a layer of each kind with the plan (tensor parallelism only; takes seconds)",
    )
    add("--output", **FILE, help="write the plan, for --mux-plan FILE")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that a run has, too."""
    add = parser.add_argument
    add("--memory-limit", type=size, metavar="SIZE", help="memory that a rank may use, such as 40GiB")
    add(
        "--backbone-weights", choices=("resident", "sharded", "offloaded", "sharded-offloaded"), default="resident",
        help="where frozen weights are kept between uses, as in the run",
    )  # fmt: skip
    add(
        "--backbone-dtype", choices=("nf4", "int8", "fp8"),
        help="how the weights of linear modules are quantised on load, as in the run",
    )  # fmt: skip
    add(
        "--bf16",
        action="store_const",
        const=True,
        help="the backbone in bfloat16 (default: as a run on the device)",
    )
    add(
        "--fp32",
        action="store_false",
        dest="bf16",
        default=None,
        help="the backbone in fp32, as with --mux-fp32",
    )
    add("--sequence-parallel", action="store_true", help="tensor ranks divide the rows, as in the run")
    add("--recompute-granularity", choices=("full", "selective"), help="recomputation, as in the run")
    add("--micro-batches", **COUNT, help="micro-batches of a bucket's step (default: chosen by the planner)")
    add(
        "--chunk-size",
        type=auto_or_none(at_least(1)),
        default="auto",
        metavar="N",
        help="tokens, none, or auto (default)",
    )
    add("--align", choices=("dense", "max-length", "longest"), default="dense", help="padding (dense: none)")
    add(
        "--interleave",
        choices=("off", "kahn", "halves", "auto"),
        default="auto",
        help="how tensor ranks hide their messages, as --mux-interleave (default: auto)",
    )


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Plan and print; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser(program).parse_args(argv)), program)


def run(arguments: argparse.Namespace) -> None:
    """Plan and print, with a parsed command line."""
    from megatron_mux.backbone.registry import read_backbone_info
    from megatron_mux.console import make_console
    from megatron_mux.data.dataset import DataFiles
    from megatron_mux.data.tokenizer import load_tokenizer
    from megatron_mux.files import write_output
    from megatron_mux.fusion.mesh import possible_meshes
    from megatron_mux.fusion.plan import dumps
    from megatron_mux.fusion.planner.load import TaskLoad, adapts_experts
    from megatron_mux.fusion.planner.plan_tables import print_meshes, print_plan
    from megatron_mux.sweep.leaderboard import settings_table
    from megatron_mux.tasks import read_task_file
    from megatron_mux.training.eval_setup import evaluation_time
    from megatron_mux.training.task_setup import open_tasks

    _check_flags(arguments)
    file = read_task_file(arguments.tasks, data_later=True)
    info = read_backbone_info(arguments.backbone, arguments.backbone_dtype)
    if arguments.subgraphs:
        info.shape.refuse("--subgraphs", "latent", "experts")
    tasks = open_tasks(
        file.tasks, info, DataFiles(load_tokenizer(info.tokenizer), to_stderr), lambda text: None
    )
    loads = {t.spec.name: TaskLoad.of(t.spec, t.data.lengths, t.data.label_counts, info.shape) for t in tasks}
    if arguments.gpus is None:
        meshes = [_mesh(arguments, info, loads)]
    else:
        whole = adapts_experts(loads.values())
        meshes = possible_meshes(info.shape, arguments.gpus, arguments.virtual_stages, whole)
        meshes = [mesh for mesh in meshes if mesh.predicts_memory or not arguments.memory_limit]
    # The modules loaded by now live until the end: without this, one collection of garbage while plans are compared
    # takes 0.3 s to look at them.
    gc.freeze()
    plans, refused = _plans(arguments, info, loads, meshes)
    planner, best, seconds = plans[0]
    start = time.perf_counter()
    comparison = planner.compare(loads)
    seconds += time.perf_counter() - start
    evaluation = evaluation_time(tasks, planner.context)
    if arguments.subgraphs:
        from megatron_mux.dry_run.layer_subgraphs import with_subgraphs

        best = with_subgraphs(best, planner.context, sum(load.total for load in loads.values()))
    if arguments.output is not None:
        write_output("--output", arguments.output, dumps(best))
    if arguments.json:
        extra = {"planning_s": seconds, "flags": flags(planner.context), "mesh": _of_meshes(plans)}
        extra |= {"evaluation": evaluation and asdict(evaluation), "sweeps": _settings(file)}
        print(json.dumps({**best.to_json(), **asdict(comparison), **extra}))
        return
    print_plan(best, comparison, {name: load.total for name, load in loads.items()}, seconds, evaluation)
    for name, settings in _settings(file).items():
        make_console().print(settings_table(name, settings))
    if arguments.gpus is not None:
        print_meshes([(plan, flags(other.context)) for other, plan, _ in plans], refused)
    print(f"run it with: {_command(arguments, planner.context)}")


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that contradict each other."""
    if arguments.gpus is not None and any(getattr(arguments, name) is not None for name in _DEGREES):
        raise UserError(f"--gpus: chooses how ranks are divided: leave out {_flags_of(_DEGREES)}")
    if arguments.virtual_stages > 1 and arguments.gpus is None and (arguments.stages or 1) == 1:
        raise UserError("--virtual-stages: needs --stages of at least 2")
    if arguments.subgraphs and arguments.gpus is None and (arguments.tensor_parallel or 1) == 1:
        raise UserError(
            "--subgraphs: needs --tensor-parallel of at least 2: layers of one rank send no messages"
        )


def _of_meshes(plans: Sequence[tuple[Planner, Plan, float]]) -> list[dict[str, Any]]:
    """The meshes that plans were made for, as plain data."""
    return [{**asdict(plan.mesh), "predicted_latency_s": plan.predicted_latency_s} for _, plan, _ in plans]


def _settings(file: TaskFile) -> dict[str, Any]:
    """The settings of each sweep's configurations."""
    return {name: sweep.configurations for name, sweep in file.sweeps.items()}


def _mesh(arguments: argparse.Namespace, info: Any, loads: Mapping[str, TaskLoad]) -> Mesh:
    """The mesh that the flags ask for.

    Raises:
        UserError: The backbone, or so many ranks, cannot be divided so.
    """
    from megatron_mux.expert_ranks import size_problems
    from megatron_mux.fusion.mesh import Mesh
    from megatron_mux.fusion.planner.load import adapts_experts

    stages, tensor, data, expert, expert_tensor, managers = (
        getattr(arguments, name) or 0 for name in _DEGREES
    )
    mesh = Mesh(tensor or 1, stages or 1, data or 1)
    if info.shape.experts is not None:
        mesh = replace(
            mesh, expert=expert or 1, expert_tensor=expert_tensor or mesh.tensor, managers=managers
        )
    elif expert or expert_tensor or managers:
        given = [name for name in _DEGREES if name.startswith("expert") and getattr(arguments, name)]
        raise UserError(f"{_flags_of(given)}: a {info.shape.family} has no experts: remove it")
    divided = (mesh.expert, mesh.expert_tensor or 1)
    info.check_parallel(mesh.tensor, mesh.pipeline * arguments.virtual_stages, *divided)
    if managers and mesh.ranks > managers + 1:
        given = [name for name in _DEGREES[:-1] if getattr(arguments, name)]
        raise UserError(f"--expert-managers: their master is one rank: leave out {_flags_of(given)}")
    problems = size_problems(mesh.ranks - managers, mesh.tensor, mesh.pipeline, *divided)
    if problems:
        raise UserError(*problems)
    if mesh.tensor > 1 and mesh.expert_tensor is not None and not arguments.sequence_parallel:
        raise UserError("--tensor-parallel: with experts it needs --sequence-parallel: add it")
    if (mesh.expert_tensor or 1) > 1 and adapts_experts(loads.values()):
        raise UserError(
            "--tensor-parallel: some task adapts routed experts, which tensor ranks cannot divide then: add "
            "--expert-tensor-parallel 1"
        )
    if arguments.memory_limit:
        mesh.refuse_memory_limit("--memory-limit")
    return mesh


def _flags_of(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _plans(
    arguments: argparse.Namespace, info: Any, loads: Mapping[str, TaskLoad], meshes: Sequence[Mesh]
) -> tuple[list[tuple[Planner, Plan, float]], dict[Mesh, str]]:
    """Plan for each mesh; returns planner, plan and planning seconds by latency, and why other meshes do not fit."""
    from megatron_mux.fusion.planner.balance import balanced_split
    from megatron_mux.fusion.planner.planner import Planner, choose_recompute
    from megatron_mux.fusion.profiler.profile_store import profile_of_mesh

    kind, dtype = _device(arguments)
    plans: list[tuple[Planner, Plan, float]] = []
    refused: dict[Mesh, str] = {}
    ranks = meshes[0].ranks
    threads = arguments.threads or (None if ranks == 1 else 1)

    @cache  # what is said of a profile is said once
    def profile(alike: Mesh) -> Profile:
        return profile_of_mesh(alike, info.shape, kind, dtype, threads, arguments.profiles, to_stderr, ranks)

    def divide(context: PlanningContext) -> PlanningContext:
        alone = context.mesh.pipeline == 1
        return context if alone else context.with_split(balanced_split(context, arguments.virtual_stages))

    for mesh in meshes:
        # A stage's profile is that of a rank, whatever the number of stages and pipelines.
        device = profile(replace(mesh, pipeline=1, data=1))
        context = _context(arguments, info, loads, mesh, device, dtype.itemsize)
        start = time.perf_counter()
        say = to_stderr if len(meshes) == 1 else lambda text: None  # of several, the flags tell
        try:
            mesh.refuse_residence("--backbone-weights", arguments.backbone_weights)
            planner = Planner(choose_recompute(context, kind, arguments.recompute_granularity, divide, say))
            plans.append((planner, planner.plan(loads), time.perf_counter() - start))
        except UserError as error:
            if len(meshes) == 1:
                raise
            refused[mesh] = error.problems[0]
    if not plans:
        raise UserError(*dict.fromkeys(refused.values()))
    plans.sort(key=lambda entry: entry[1].predicted_latency_s or 0.0)
    planner, best, seconds = plans[0]  # without a limit memory is predicted of this one, on a CPU of none
    if not arguments.memory_limit and kind != "cpu" and planner.context.mesh.predicts_memory:
        planner = Planner(_with_tables(arguments, planner.context))
        try:
            plans[0] = planner, planner.priced(best, loads), seconds
        except UserError as error:  # nobody has asked for it
            to_stderr(str(error))
    return plans, refused


def _context(
    arguments: argparse.Namespace,
    info: Any,
    loads: Mapping[str, TaskLoad],
    mesh: Mesh,
    profile: Profile,
    itemsize: int,
) -> PlanningContext:
    """What the flags ask for on a mesh, before layers are divided into stages."""
    from megatron_mux.fusion.planner.planning_context import ROLLING_STEPS, PlanningContext

    # With experts tensor parallelism needs it.
    divides_rows = arguments.sequence_parallel or info.shape.experts is not None
    context = PlanningContext(
        profile,
        info,
        mesh,
        itemsize,
        arguments.recompute_granularity or "none",
        arguments.memory_limit,
        arguments.align,
        arguments.chunk_size,
        arguments.micro_batches,
        rolling=ROLLING_STEPS,
        residence=arguments.backbone_weights,
        sequence_parallel=mesh.tensor > 1 and divides_rows,
        interleave=arguments.interleave,
        tasks=loads,
    )
    return _with_tables(arguments, context) if arguments.memory_limit else context


def _with_tables(arguments: argparse.Namespace, context: PlanningContext) -> PlanningContext:
    """The context that can predict memory."""
    from megatron_mux.estimate.run_tables import RunTables

    return replace(context, tables=RunTables(context, arguments.backbone_dtype, to_stderr))


def _device(arguments: argparse.Namespace) -> tuple[str, Any]:
    """The device to plan for, and the backbone's dtype there."""
    import torch

    from megatron_mux.backbone.registry import stored_dtype
    from megatron_mux.gpus import known
    from megatron_mux.runtime import has_bf16

    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no GPU: name one, such as H100")
    if kind in ("cpu", "cuda"):
        fast = kind == "cuda" and has_bf16(torch.device(kind))
    else:
        fast = known(kind, "cpu", "cuda").gpu.capability >= (8, 0)
    bf16 = in_bf16(arguments.bf16, stored_dtype(arguments.backbone), fast)
    dtype = torch.bfloat16 if bf16 else torch.float32
    return kind, dtype


def flags(context: PlanningContext) -> str:
    """Return the flags of a run on this mesh with this recomputation, each with a space behind it."""
    words = [*context.mesh.flags]
    if context.recompute != "none":
        words += ["--recompute-granularity", context.recompute]
    return "".join(f"{word} " for word in words)


def _command(arguments: argparse.Namespace, context: PlanningContext) -> str:
    """Return the command that runs the plan."""
    flag = "--processes" if _device(arguments)[0] == "cpu" else "--gpus"
    words = [
        f"megatron-mux train {quote(str(arguments.tasks))} --backbone {quote(shown_model(arguments.backbone))}",
        f"{flag} {context.mesh.ranks} {flags(context)}--save SAVE_DIR",
    ]
    if arguments.bf16 is not None:
        words.append("--bf16" if arguments.bf16 else "--mux-fp32")
    if arguments.backbone_dtype is not None:
        words.append(f"--mux-backbone-dtype {arguments.backbone_dtype}")
    if arguments.backbone_weights != "resident":
        words.append(f"--mux-backbone-weights {arguments.backbone_weights}")
    if context.sequence_parallel and context.mesh.expert_tensor is None:  # else among the mesh's own
        words.append("--sequence-parallel")
    if arguments.memory_limit:
        words.append(f"--mux-memory-limit {arguments.memory_limit}")
    words.append(
        f"--mux-plan {quote(str(arguments.output))}"
        if arguments.output
        else "--mux-plan FILE (--output FILE writes it)"
    )
    return " ".join(words)
