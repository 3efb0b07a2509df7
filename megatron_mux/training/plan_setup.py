"""From the command line to the run's plans: one walk that fills a `PlanningContext` and hands it to the planner.

flags, backbone, ranks          -> context: profile, mesh, memory limit
+ the known plan or cost        -> layers of each stage (`layer_split.py`)
+ admission                     -> the tasks that train first
+ planner                       -> the first plan, and `Planning` for those that follow
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.checkpoint import Manifest
from megatron_mux.engine import Planning, Task
from megatron_mux.engine.agreement import computed_by_first, from_first
from megatron_mux.errors import UserError
from megatron_mux.estimate.run_tables import RunTables
from megatron_mux.fusion.check import check_plan, read_plan
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner, choose_recompute
from megatron_mux.fusion.planner.planning_context import ROLLING_STEPS, PlanningContext
from megatron_mux.fusion.profiler.profile import Profile
from megatron_mux.fusion.profiler.profile_store import profile_of_mesh
from megatron_mux.kernels.pointwise.choice import pointwise_name
from megatron_mux.memory.sizes import show_size
from megatron_mux.runtime import Parallel, device_memory
from megatron_mux.training.admission import first_tasks
from megatron_mux.training.layer_split import split_layers
from megatron_mux.training.resumed import is_over
from megatron_mux.training.task_setup import Progress

_MARGIN = 1 / 16
"""Share of a GPU's memory that is left free by default: predictions err by up to that much."""


def make_planning(
    arguments: MuxArguments,
    info: BackboneInfo,
    tasks: Sequence[Task],
    parallel: Parallel,
    manifest: Manifest | None,
    say: Progress,
) -> Planning:
    """How tasks will share steps: by the flags, the plan file or the plan of the continued run.

    Args:
        arguments: The command line.
        info: The backbone.
        tasks: The tasks to register.
        parallel: This rank's place; every rank calls this function.
        manifest: The save to continue from, if any.
        say: Told which kernels compute element-wise work, where predictions come from, and the plan.

    Raises:
        UserError: The plan file is not for this run, or a task does not fit into memory.
    """
    known = _known_plan(arguments, manifest, say)
    share = partial(from_first, parallel=parallel)
    profile = _profile(arguments, info, parallel, say)
    if known is not None:  # a continued run computes as before
        profile = replace(profile, kernels=known.kernels)
    context = choose_recompute(
        _context(arguments, info, profile, _loads(tasks, manifest, info), parallel, say),
        parallel.device.type,
        arguments.recompute_granularity,
        lambda tried: _predictable(split_layers(tried, arguments, known, share), arguments, say),
        say,
    )
    say(f"element-wise kernels: {context.pointwise}")
    if known is not None:
        known = replace(known, pointwise=context.pointwise)  # those of this machine
    mesh = context.mesh
    stages: dict[str, Any] = {
        "stages": mesh.stages,
        "virtual": mesh.virtual,
        "split": mesh.split,
        "schedule": context.schedule,
        "kernels": profile.kernels,
        "pointwise": context.pointwise,
    }
    if arguments.mux_policy != "auto":
        return Planning(
            arguments.mux_policy,
            micro_batches=context.micro_batches,
            chunk=context.chunk if isinstance(context.chunk, int) else None,
            alignment=context.alignment,
            **stages,
        )
    planner = Planner(context)
    given = _first_plan(arguments, planner, known, manifest is not None, share, say)
    leads = parallel.rank == 0
    return Planning("auto", planner=planner, given=given, leads=leads, share=share, **stages)


def _context(
    arguments: MuxArguments,
    info: BackboneInfo,
    profile: Profile,
    loads: dict[str, TaskLoad],
    parallel: Parallel,
    say: Progress,
) -> PlanningContext:
    """The context that the flags ask for, before layers are divided into stages."""
    mesh = mesh_of(arguments, info, parallel)
    context = PlanningContext(
        profile,
        info,
        mesh,
        arguments.dtype.itemsize,
        arguments.recompute_granularity or "none",
        memory_limit(arguments, mesh, parallel, say),
        arguments.mux_align,
        arguments.mux_chunk_size,
        arguments.mux_micro_batches,
        schedule=arguments.mux_schedule,
        rolling=ROLLING_STEPS if arguments.mux_rolling else 1,
        residence=arguments.mux_backbone_weights,
        sequence_parallel=arguments.sequence_parallel,
        interleave=arguments.mux_interleave,
        pointwise=pointwise_name(parallel.device, arguments.dtype),
        tasks=loads,
    )
    if context.memory_limit is None:
        return context
    share, leads = partial(computed_by_first, parallel=parallel), parallel.rank == 0
    return replace(context, tables=RunTables(context, arguments.mux_backbone_dtype, say, share, leads))


def _predictable(context: PlanningContext, arguments: MuxArguments, say: Progress) -> PlanningContext:
    """The context without its limit if memory cannot be predicted and nobody has asked for one.

    Raises:
        UserError: A limit is asked for, and memory cannot be predicted.
    """
    if context.memory_limit is None:
        return context
    try:
        if context.tasks:
            context.step_memory()
    except UserError as error:
        if arguments.mux_memory_limit != "auto":
            raise
        say(f"planning without a limit of memory: {error}")
        return replace(context, memory_limit=None, tables=None)
    return context


def mesh_of(arguments: MuxArguments, info: BackboneInfo, parallel: Parallel) -> Mesh:
    """How the flags divide the ranks; layers are divided later."""
    mesh = Mesh(parallel.tp_size, parallel.pp_size, parallel.dp_size)
    if info.shape.experts is None:
        return mesh
    expert, expert_tensor = arguments.expert_sizes(info.shape)
    return replace(mesh, expert=expert, expert_tensor=expert_tensor, managers=arguments.expert_managers)


def memory_limit(arguments: MuxArguments, mesh: Mesh, parallel: Parallel, say: Progress) -> float | None:
    """Bytes that a rank may use, the same on every rank; None: no limit. Every rank calls it.

    Only the planner keeps to a limit: by default the other policies have none.

    Args:
        arguments: The command line.
        mesh: How the ranks are divided.
        parallel: This rank's place.
        say: Told of a limit that no flag asked for.

    Raises:
        UserError: A limit is asked for where memory is not predicted.
    """
    given = arguments.mux_memory_limit
    if not mesh.predicts_memory:
        if given not in ("auto", None):
            mesh.refuse_memory_limit("--mux-memory-limit")
        return None
    if given != "auto":
        return given
    own = device_memory(parallel.device) if arguments.mux_policy == "auto" else None
    if own is None:
        return None
    smallest = -parallel.most([-float(own)])[0]
    limit = smallest * (1 - _MARGIN)
    say(
        f"planning for {show_size(limit)} of a GPU's {show_size(smallest)} (change it with --mux-memory-limit)"
    )
    return limit


def _loads(tasks: Sequence[Task], manifest: Manifest | None, info: BackboneInfo) -> dict[str, TaskLoad]:
    """The tasks as the planner sees them, without those that the continued run has finished or pruned."""
    entries = {entry.name: entry for entry in manifest.tasks} if manifest is not None else {}
    pruned = {name for name, entry in entries.items() if entry.status == "pruned"}
    return {
        task.spec.name: TaskLoad.of(task.spec, task.data.lengths, task.data.label_counts, info.shape)
        for task in tasks
        if task.spec.name not in pruned and not is_over(task, entries.get(task.spec.name))
    }


def _profile(arguments: MuxArguments, info: BackboneInfo, parallel: Parallel, say: Progress) -> Profile:
    """The profile for the first rank's device; the same on every rank."""
    found = None
    if parallel.rank == 0:
        mesh = mesh_of(arguments, info, parallel)
        found = profile_of_mesh(mesh, info.shape, parallel.device.type, arguments.dtype, say=say)
    shared = from_first(found, parallel)
    assert shared is not None  # the first rank's
    return shared


def _known_plan(arguments: MuxArguments, manifest: Manifest | None, say: Progress) -> Plan | None:
    """The plan of the continued run, or the one in the plan file; None: neither.

    Raises:
        UserError: The file is not a plan.
    """
    if manifest is None:
        return read_plan(arguments.mux_plan) if arguments.mux_plan is not None else None
    if arguments.mux_plan is not None:
        say(f"--mux-plan {arguments.mux_plan} is ignored: the continued run has its own plan")
    try:
        return Plan.from_json(manifest.plan)
    except UserError:
        say("the plan of the continued run is of an earlier version: planning anew")
        return None


def _first_plan(
    arguments: MuxArguments,
    planner: Planner,
    known: Plan | None,
    continued: bool,
    share: Callable[[Any], Any],
    say: Progress,
) -> Plan | None:
    """The known plan if it is for this run, else a new one; None if there is no task yet.

    Raises:
        UserError: The plan file is not for this run, or a task does not fit into memory.
    """
    context = planner.context
    if known is not None and not continued:
        planner.check(context.tasks)  # a plan file says which tasks train together
        return _plan_of_file(arguments, planner, known, say)
    tasks = first_tasks(planner, context.tasks)
    wanted = (context.mesh, context.schedule, "auto")
    if known is not None and known.buckets and (known.mesh, known.schedule, known.policy) == wanted:
        return known
    if not tasks:
        return None
    plan: Plan = share(planner.plan(tasks))
    say(f"{plan}\n  predicted {plan.predicted_latency_s:.3g} s a step, by the {plan.costs}")
    return plan


def _plan_of_file(arguments: MuxArguments, planner: Planner, plan: Plan, say: Progress) -> Plan:
    context, file = planner.context, arguments.mux_plan
    try:
        check_plan(plan, context.info.fingerprint, context.mesh, sorted(context.tasks))
    except UserError as error:
        raise UserError(*(f"{file}: {problem}" for problem in error.problems)) from error
    if context.memory_limit is not None:
        needed = max(planner.priced(plan, context.tasks).memory_bytes)
        if needed > context.memory_limit:
            raise UserError(
                f"{file}: needs {needed / (1 << 20):.0f} MiB on a rank, more than --mux-memory-limit: "
                "plan anew with --memory-limit"
            )
    say(f"following {file}\n{plan}")
    return replace(plan, policy="auto", replan_in=0)
