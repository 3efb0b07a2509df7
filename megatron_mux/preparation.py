"""From task specs to tasks ready to register, to the plan, and to ranks that are watched: before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_mux.adapters.peft_format import read_adapter
from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.division import divided
from megatron_mux.engine import Planning, Task
from megatron_mux.errors import UserError
from megatron_mux.fusion.check import check_plan, read_plan
from megatron_mux.fusion.desk import ROLLING_STEPS, Mesh, Premises
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner import Planner
from megatron_mux.fusion.profile import Profile, about_run, load_profile, profile_directory
from megatron_mux.fusion.roofline import roofline
from megatron_mux.liveness import Liveness
from megatron_mux.memory.sizes import show_size
from megatron_mux.runtime import Parallel, device_memory
from megatron_mux.tasks import TaskSpec
from megatron_mux.training.admission import first_tasks

Progress = Callable[[str], None]

_MARGIN = 1 / 16
"""Of a GPU's memory, left alone by default: predictions of it err by up to so much."""


def with_saved(specs: Sequence[TaskSpec], manifest: Manifest | None) -> list[TaskSpec]:
    """The tasks to run: those saved, in their order, then new ones; a saved task may not have changed.

    Args:
        specs: The tasks that were given.
        manifest: The save that is continued, if any.

    Raises:
        UserError: A task's spec is not the one that was saved.
    """
    if manifest is None:
        return list(specs)
    given = {spec.name: spec for spec in specs}
    saved = {entry.name: entry for entry in manifest.tasks}
    problems = [_changed(saved[name], spec) for name, spec in given.items() if name in saved]
    if any(problems):
        raise UserError(*(problem for problem in problems if problem))
    order = [name for name in saved if name in given] + [name for name in given if name not in saved]
    return [given[name] for name in order]


def joinable(
    specs: Sequence[TaskSpec],
    entries: Mapping[str, SavedTask],
    registered: Collection[str],
    waiting: Collection[str],
    continued: bool,
) -> None:
    """Refuse tasks that would join a run under names that it has used for something else.

    Args:
        specs: The tasks that would join.
        entries: Every task the run has had.
        registered: Those it trains now.
        waiting: Those that it will train.
        continued: Whether the run continues a save; it may have left out tasks of it so far.

    Raises:
        UserError: A name is taken.
    """
    problems: list[str] = []
    for spec in specs:
        entry = entries.get(spec.name)
        if entry is None and spec.name not in waiting:
            continue
        if entry is None or spec.name in registered or entry.status == "removed" or not continued:
            problems.append(f"task {spec.name!r}: this run has or had a task of that name: choose another")
        elif changed := _changed(entry, spec):
            problems.append(changed)
    if problems:
        raise UserError(*problems)


def _changed(entry: SavedTask, spec: TaskSpec) -> str:
    """What is wrong with continuing `entry` as `spec`; empty if nothing. Files may have moved."""
    differences = spec.differences(TaskSpec.model_validate(entry.spec))
    if not differences:
        return ""
    what = "; ".join(differences)
    return f"task {spec.name!r} is not as it was saved ({what}): restore it, or give it a new name"


def prepare(
    specs: Sequence[TaskSpec],
    info: BackboneInfo,
    tokenizer: Any,
    say: Progress,
    resumed: Collection[str] = (),
) -> list[Task]:
    """Open every task's data and check it against the backbone.

    Args:
        specs: Validated tasks.
        info: The backbone's shape and module names.
        tokenizer: The backbone's tokenizer.
        say: Told what is going on, a line at a time.
        resumed: Names of tasks that continue from a checkpoint and need no adapter to start from.

    Returns:
        The tasks in the same order.

    Raises:
        UserError: With the problems of all tasks.
    """
    tasks: list[Task] = []
    problems: list[str] = []
    for spec in specs:
        try:
            tasks.append(_prepare(spec, info, tokenizer, say, spec.name in resumed))
        except UserError as error:
            problems += [f"task {spec.name!r}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(*problems)
    return tasks


def _prepare(spec: TaskSpec, info: BackboneInfo, tokenizer: Any, say: Progress, resumed: bool) -> Task:
    problems: list[str] = []

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except UserError as error:
            problems.extend(error.problems)
            return None

    limit = info.shape.position_limit
    virtual = spec.adapter.virtual_tokens
    if limit is not None and spec.data.max_length + virtual > limit:
        problems.append(
            f"data.max_length: {spec.data.max_length}{f' plus {virtual} virtual tokens' if virtual else ''} is more "
            f"than the {limit} positions of the backbone: choose at most {limit - virtual}"
        )
    attempt(lambda: spec.adapter.modules(info.shape))
    data = attempt(lambda: TaskDataset(spec.data.path, tokenizer, spec.data.max_length))
    evaluation = None
    if spec.eval is not None:
        path = spec.eval.path
        evaluation = attempt(lambda: TaskDataset(path, tokenizer, spec.data.max_length))
    initial = None
    source = spec.adapter.adapter_name_or_path
    if source is not None and not resumed:
        initial = attempt(lambda: read_adapter(source, spec.adapter, info.shape))
    if problems:
        raise UserError(*problems)
    for dataset in (data, evaluation):
        if dataset is not None and dataset.dropped:
            say(
                f"{spec.name}: {dataset.path}: {dataset.dropped} of {dataset.dropped + len(dataset)} records have no "
                f"token to learn from within {spec.data.max_length} tokens and were dropped"
            )
    return Task(spec, data, evaluation, initial)


def prepare_planning(
    arguments: MuxArguments,
    info: BackboneInfo,
    tasks: Sequence[Task],
    parallel: Parallel,
    manifest: Manifest | None,
    say: Progress,
) -> Planning:
    """How tasks will share steps: by the flags, the plan file or the plan of the run that is continued.

    Args:
        arguments: The command line.
        info: The backbone.
        tasks: What will be registered.
        parallel: Where this rank stands.
        manifest: The save that is continued, if any.
        say: Told where predicted figures come from, and the plan.

    Raises:
        UserError: The plan file is not for this run, or a task does not fit into memory.
    """
    done = {entry.name for entry in manifest.tasks if entry.status != "running"} if manifest else set()
    loads = {
        task.spec.name: TaskLoad.of(task.spec, task.data.lengths, task.data.label_counts, info.shape)
        for task in tasks
        if task.spec.name not in done
    }
    known = _known_plan(arguments, manifest, say)
    premises = _premises(arguments, info, parallel, say)
    premises = divided(premises, arguments, list(loads.values()), known, _from_first)
    mesh = premises.mesh
    stages: dict[str, Any] = {
        "stages": mesh.stages,
        "virtual": mesh.virtual,
        "split": mesh.split,
        "schedule": arguments.mux_schedule,
    }
    if arguments.mux_policy != "auto":
        chunk = arguments.mux_chunk_size
        return Planning(
            arguments.mux_policy,
            micro_batches=arguments.mux_micro_batches,
            chunk=chunk if isinstance(chunk, int) else None,
            alignment=arguments.mux_align,
            **stages,
        )
    planner = Planner(premises)
    if known is None or manifest is not None:
        loads = first_tasks(planner, loads)
    else:  # a plan file says by itself who trains together
        planner.check(loads)
    given = _given_plan(arguments, planner, loads, known, continued=manifest is not None, say=say)
    if given is None and loads:
        given = _from_first(planner.plan(loads))
        say(f"{given}\n  predicted {given.predicted_latency_s:.3g} s a step, by the {given.costs}")
    leads = parallel.rank == 0
    return Planning("auto", planner=planner, given=given, leads=leads, share=_from_first, **stages)


def _premises(arguments: MuxArguments, info: BackboneInfo, parallel: Parallel, say: Progress) -> Premises:
    """What plans are made on, but for which layers a stage has."""
    return Premises(
        _profile(arguments, info, parallel, say),
        info,
        Mesh(parallel.tp_size, parallel.pp_size, parallel.dp_size),
        arguments.dtype.itemsize,
        arguments.recompute_granularity or "none",
        memory_limit(arguments, parallel, say),
        arguments.mux_align,
        arguments.mux_chunk_size,
        arguments.mux_micro_batches,
        schedule=arguments.mux_schedule,
        rolling=ROLLING_STEPS if arguments.mux_rolling else 1,
        residence=arguments.mux_backbone_weights,
        sequence_parallel=arguments.sequence_parallel,
    )


def memory_limit(arguments: MuxArguments, parallel: Parallel, say: Progress) -> float | None:
    """Bytes that a rank may use, the same on every rank; None: not limited. Every rank calls it.

    Only the planner keeps to a limit: by default the other policies have none.

    Args:
        arguments: The command line.
        parallel: Where this rank stands.
        say: Told of a limit that nobody has asked for.
    """
    given = arguments.mux_memory_limit
    if given != "auto":
        return given
    there = device_memory(parallel.device) if arguments.mux_policy == "auto" else None
    if there is None:
        return None
    least = -parallel.most([-float(there)])[0]
    limit = least * (1 - _MARGIN)
    say(f"planning for {show_size(limit)} of a GPU's {show_size(least)} (--mux-memory-limit says otherwise)")
    return limit


def _from_first(what: Any) -> Any:
    """What the first rank has, on every rank; all of them call it."""
    shared = [what]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _known_plan(arguments: MuxArguments, manifest: Manifest | None, say: Progress) -> Plan | None:
    """The plan of the run that is continued, or the one in a file.

    Raises:
        UserError: The file holds no plan.
    """
    if manifest is not None:
        if arguments.mux_plan is not None:
            say(f"--mux-plan {arguments.mux_plan} is left alone: the run that is continued has its plan")
        try:
            return Plan.from_json(manifest.plan)
        except UserError:
            say("the plan of the run that is continued is of an earlier version: planning anew")
            return None
    return read_plan(arguments.mux_plan) if arguments.mux_plan is not None else None


def _given_plan(
    arguments: MuxArguments,
    planner: Planner,
    loads: Mapping[str, TaskLoad],
    known: Plan | None,
    continued: bool,
    say: Progress,
) -> Plan | None:
    """The plan that this run need not make, if `known` is one for it."""
    if known is None:
        return None
    if continued:
        is_ours = Mesh.of(known) == planner.mesh and known.policy == "auto" and known.buckets
        if not is_ours or known.schedule != arguments.mux_schedule:
            return None
        return known
    plan = known
    try:
        check_plan(plan, planner.info.fingerprint, planner.mesh, sorted(loads))
    except UserError as error:
        raise UserError(*(f"{arguments.mux_plan}: {problem}" for problem in error.problems)) from error
    if planner.memory_limit is not None:
        needed = max(planner.priced(plan, loads).memory_bytes)
        if needed > planner.memory_limit:
            raise UserError(
                f"{arguments.mux_plan}: needs {needed / (1 << 20):.0f} MiB on a rank, more than --mux-memory-limit: "
                "plan anew with --memory-limit"
            )
    say(f"following {arguments.mux_plan}\n{plan}")
    return replace(plan, policy="auto", replan_in=0)


def _profile(arguments: MuxArguments, info: BackboneInfo, parallel: Parallel, say: Progress) -> Profile:
    """The measured profile of this backbone on the first rank's device, else a roofline; the same on every rank."""
    kind = parallel.device.type
    about = about_run(info.shape, kind, arguments.dtype, parallel.tp_size)
    found: Profile | str | None = None
    if parallel.rank == 0:
        try:
            found = load_profile(about, profile_directory())
        except UserError as error:
            found = str(error)
    about, found = _from_first((about, found))
    if isinstance(found, Profile):
        return found
    if found is not None:
        say(f"{found}; going on without it")
    return roofline(info.shape, about, arguments.dtype.itemsize, parallel.tp_size)


@contextmanager
def watched(parallel: Parallel, arguments: MuxArguments, farewell: Callable[[], None]) -> Iterator[Parallel]:
    """Several ranks end together when one of them dies or stalls; its result hears what this one is at.

    Args:
        parallel: Where this rank stands.
        arguments: What the user asked for.
        farewell: Called before the process is ended.

    Raises:
        UserError: Rank 0 cannot be reached.
    """
    if parallel.world_size == 1:
        yield parallel
        return
    advice = "Nothing is saved, for want of --save."
    if arguments.save is not None:
        advice = f"Continue from the last save with --load {arguments.save}."
    timeout = arguments.distributed_timeout_minutes * 60
    rank, stage = parallel.rank, parallel.pp_rank
    with Liveness(rank, parallel.world_size, stage, timeout, advice, farewell) as liveness:
        yield replace(parallel, heartbeat=liveness)
