"""A run: read the input, join the other processes, load the backbone, and train until every task is done."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_mux import checkpoint
from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.communication import CTAS, make_exchange
from megatron_mux.backbone.exchange import Exchange
from megatron_mux.backbone.model import Backbone, load_stages
from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info, stored_dtype
from megatron_mux.checkpoint import Manifest
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.directory_lock import DirectoryLock
from megatron_mux.engine import Engine, Planning
from megatron_mux.engine.agreement import everyones, raise_on_every_rank
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.files import prepare_directory
from megatron_mux.kernels.triton_choice import notice_of_loops
from megatron_mux.launcher import local_leader_first
from megatron_mux.library_log import keep_library_log, release_terminal
from megatron_mux.liveness import Liveness
from megatron_mux.moe.entries import Ints
from megatron_mux.moe.topology import Topology
from megatron_mux.report import Reporter
from megatron_mux.runtime import Parallel, has_bf16, initialize, use_tf32
from megatron_mux.saved_files import refuse_used
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskFile, TaskSpec, read_task_file
from megatron_mux.tasks.life import TaskLives
from megatron_mux.training.best import check_best_is_saved
from megatron_mux.training.callback import Callback
from megatron_mux.training.commands import CommandSource
from megatron_mux.training.expert_placement import expert_placement, kept_placement, placement_on_managers
from megatron_mux.training.expert_topology import check_topology
from megatron_mux.training.expert_watch import watch_experts
from megatron_mux.training.loop_setup import make_loop
from megatron_mux.training.plan_setup import make_planning
from megatron_mux.training.signals import stop_on_signals
from megatron_mux.training.sweep_setup import check_comparisons, check_sweeps, with_saved_trials
from megatron_mux.training.task_setup import merge_saved, open_tasks


def run(
    arguments: MuxArguments,
    program: str = "pretrain_mux.py",
    commands: CommandSource | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Fine-tune the tasks that `arguments` name.

    It joins the world of processes; leaving it (`runtime.shutdown`) is for the caller, who first tells what was wrong.

    Args:
        arguments: The command line.
        program: Printed before the message that ends all ranks when one of them is lost.
        commands, callbacks: See `make_loop`.

    Raises:
        UserError: The input is wrong: everything that can be checked is, before a weight is read.
    """
    arguments.check_device("cuda" if torch.cuda.is_available() else "cpu")
    save = arguments.save
    if save is None or os.environ.get("RANK", "0") != "0":
        _run(arguments, program, commands, callbacks)
        return
    with DirectoryLock(save, break_lock=arguments.break_lock, say=partial(print, flush=True)) as lock:
        _run(arguments, program, commands, callbacks, lock)


def _run(
    arguments: MuxArguments,
    program: str,
    commands: CommandSource | None,
    callbacks: Sequence[Callback],
    lock: DirectoryLock | None = None,
) -> None:
    """`run`, with the lock on `--save` where this rank writes there."""
    began = time.monotonic()
    save = arguments.save
    if save is not None and save != arguments.load:
        refuse_used(save)
    file = _task_file(arguments)
    info = read_backbone_info(arguments.backbone, arguments.mux_backbone_dtype)
    arguments.check_shape(info.shape)
    info.check_parallel(
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        *arguments.expert_sizes(info.shape),
    )
    tokenizer = load_tokenizer(_tokenizer_directory(arguments, info))
    reporter = Reporter(
        save,
        arguments.tensorboard_dir,
        arguments.log_interval,
        not arguments.mux_no_progress,
        silent=os.environ.get("RANK", "0") != "0",
    )
    try:
        manifest = _manifest(arguments, info, reporter)
        if arguments.without_effect:
            reporter.say(f"accepted without effect here: {', '.join(arguments.without_effect)}")
        experts = _place_experts(arguments, info, manifest is not None, reporter)
        file = with_saved_trials(file, manifest)
        lives = _begin_lives(file.tasks, reporter)
        specs = merge_saved(file.tasks, manifest)
        check_best_is_saved(specs, save is not None)
        entries = {entry.name: entry for entry in manifest.tasks} if manifest is not None else {}
        files = DataFiles(tokenizer, reporter.say, arguments.mux_data_cache)
        with local_leader_first():
            tasks = open_tasks(specs, info, files, reporter.say, entries)
        check_comparisons(file, tasks)
        if save is None:
            reporter.say("no --save: the adapters will be lost when the run ends")
        arguments, parallel = _join_world(arguments, info.shape, reporter)
        # Signals end with the watch of ranks: torchrun's SIGTERM must not end this one before it said who was lost.
        with (
            ExitStack() as signals,
            _monitored(parallel, arguments, partial(_release, reporter), program) as parallel,
        ):
            planning = make_planning(arguments, info, tasks, parallel, manifest, reporter.say)
            _check_same_save(manifest, parallel)
            _prepare_directories(arguments, specs, parallel, reporter, lock)
            if log := keep_library_log(save):
                reporter.say(f"warnings of libraries go to {log}")
            exchange = _make_exchange(arguments, parallel, reporter)
            backbone = _load_backbone(arguments, parallel, planning, experts.placement, reporter)
            engine = Engine(backbone, parallel, planning, exchange=exchange)
            watch = watch_experts(arguments, engine, reporter, experts.topology, experts.kept)
            loop = make_loop(
                arguments,
                engine,
                reporter,
                info,
                files,
                manifest,
                watch,
                lock,
                began,
                lives,
                commands,
                callbacks,
                file,
            )
            with closing(loop):
                loop.registry.register(tasks)
                signals.enter_context(stop_on_signals(loop))
                loop.run()
        reporter.close()
    finally:
        reporter.release()


def _task_file(arguments: MuxArguments) -> TaskFile:
    """The task file that a run begins with; without tasks if it begins with none."""
    if arguments.mux_tasks is None:
        return TaskFile([])
    file = read_task_file(arguments.mux_tasks, data_later=True)
    check_sweeps(file, arguments.save is not None)
    return file


def _begin_lives(specs: Sequence[TaskSpec], reporter: Reporter) -> TaskLives:
    """Begin the lives of a run's tasks, and show them."""
    lives = TaskLives()
    for spec in specs:
        reporter.add(spec, lives.begin(spec.name, "loading"))
    return lives


def _prepare_directories(
    arguments: MuxArguments,
    specs: Sequence[TaskSpec],
    parallel: Parallel,
    reporter: Reporter,
    lock: DirectoryLock | None,
) -> None:
    """Try to write where the run will write, and note there who does."""
    problem = reporter.prepare_tracking(specs)
    if lock is not None:
        problem = problem or prepare_directory(lock.directory)
    raise_on_every_rank(problem, parallel)
    if lock is not None:
        lock.record(backbone=str(arguments.backbone.resolve()), tasks=[spec.name for spec in specs])


def _release(reporter: Reporter) -> None:
    """Close files and give the terminal back: what libraries wrote before a run's directory had a log is shown."""
    reporter.release()
    release_terminal()


def _manifest(arguments: MuxArguments, info: BackboneInfo, reporter: Reporter) -> Manifest | None:
    """The save that `--load` continues, if there is one."""
    directory = arguments.load
    if directory is None:
        return None
    manifest = checkpoint.load(directory, info.fingerprint, reporter.say)
    if manifest is None:
        if arguments.exit_on_missing_checkpoint:
            raise UserError(f"--load {directory}: no checkpoint there (--exit-on-missing-checkpoint)")
        reporter.say(f"--load {directory}: no checkpoint there yet, starting anew")
    return manifest


def _check_same_save(manifest: Manifest | None, parallel: Parallel) -> None:
    """Refuse to continue from other saves on some ranks: rank 0 may have waited while another run saved and left."""
    named = [] if manifest is None else [manifest.number, *(task.checkpoint for task in manifest.tasks)]
    if len(set(everyones(repr(named), parallel))) > 1:
        raise UserError("--load: another run saved there while this one started: start again")


def _tokenizer_directory(arguments: MuxArguments, info: BackboneInfo) -> Path:
    """Where the tokenizer is: Megatron's scripts may also name a file of it."""
    given = arguments.tokenizer_model
    return info.tokenizer if given is None else given.parent if given.is_file() else given


def _check_experts(
    arguments: MuxArguments, info: BackboneInfo, continued: bool
) -> tuple[Topology | None, str]:
    """The topology that experts are placed by, if a file gives it; refuses flags for experts without any."""
    experts = info.shape.experts
    if experts is not None:
        return check_topology(arguments, experts, len(experts.layers(info.shape.layers)), continued)
    if arguments.places_experts or arguments.replaces_experts:
        flag = "--mux-expert-placement" if arguments.places_experts else "--mux-replace-experts"
        raise UserError(f"{flag} auto: a {info.shape.family} has no experts: remove it")
    return None, ""


class _Experts(NamedTuple):
    """Where experts are to begin with.

    Attributes:
        placement: Which expert ranks hold which experts; None: the default.
        kept: Whether the continued run has kept it.
        topology: That they are placed by, if a file gives it.
    """

    placement: Placement | None
    kept: bool
    topology: Topology | None


def _place_experts(
    arguments: MuxArguments, info: BackboneInfo, continued: bool, reporter: Reporter
) -> _Experts:
    """Find out where experts are to begin with, before a weight is read; says what a user should know of it."""
    topology, of_topology = _check_experts(arguments, info, continued)
    capacities = None if topology is None else topology.capacities
    kept, of_kept = kept_placement(arguments, info, continued, capacities)
    placement, log_lines = _placement(arguments, info, kept, continued, capacities)
    for line in filter(None, [of_topology, of_kept, *log_lines]):
        reporter.say(line)
    return _Experts(placement, kept is not None, topology)


def _placement(
    arguments: MuxArguments, info: BackboneInfo, kept: Path | None, continued: bool, capacities: Ints | None
) -> tuple[Placement | None, list[str]]:
    """Which expert ranks hold which experts to begin with, and what a user should know of it."""
    asked = arguments.mux_expert_placement
    file = kept or (None if isinstance(asked, str) else asked)
    if not arguments.expert_managers:
        return expert_placement(file, info, arguments.expert_model_parallel_size, capacities), []
    capacity = arguments.mux_expert_capacity if capacities is None else capacities.tolist()
    return placement_on_managers(
        file, capacity, info, arguments.expert_managers, continued, kept=kept is not None
    )


def _join_world(
    arguments: MuxArguments, shape: BackboneShape, reporter: Reporter
) -> tuple[MuxArguments, Parallel]:
    """Join the other processes; the arguments, made definite for the device of this one, and its place."""
    expert, expert_tensor = arguments.expert_sizes(shape)
    parallel = initialize(
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.sequence_parallel,
        arguments.seed,
        timeout_minutes=arguments.distributed_timeout_minutes,
        expert_parallel=expert,
        expert_tensor_parallel=expert_tensor,
        expert_managers=arguments.expert_managers,
    )
    arguments, said = arguments.on_device(
        parallel.device.type, stored_dtype(arguments.backbone), has_bf16(parallel.device)
    )
    if said:
        reporter.say(said)
    if arguments.mux_tf32:
        use_tf32()
    return arguments, parallel


def _load_backbone(
    arguments: MuxArguments,
    parallel: Parallel,
    planning: Planning,
    placement: Placement | None,
    reporter: Reporter,
) -> list[Backbone]:
    """Load this rank's stages of the backbone, divided as planned."""
    loops = notice_of_loops(parallel.device)
    if loops is not None:
        reporter.say(loops, style="bold yellow")
    reporter.say(f"reading the backbone {arguments.backbone}")
    parallel.heartbeat.at("reading the backbone", long=True)
    return load_stages(
        arguments.backbone,
        parallel,
        arguments.dtype,
        arguments.recompute_granularity or planning.recompute,
        planning.split,
        arguments.mux_backbone_weights,
        placement=placement,
        quantise=arguments.mux_backbone_dtype,
    )


def _make_exchange(arguments: MuxArguments, parallel: Parallel, reporter: Reporter) -> Exchange | None:
    """What carries hidden messages of tensor ranks; None where the run hides none."""
    if parallel.tp_size == 1 or arguments.mux_policy != "auto" or arguments.mux_interleave == "off":
        return None
    exchange, said = make_exchange(parallel, arguments.mux_communication_ctas or CTAS)
    reporter.say(said)
    return exchange


@contextmanager
def _monitored(
    parallel: Parallel, arguments: MuxArguments, before_exit: Callable[[], None], program: str
) -> Iterator[Parallel]:
    """End all ranks together when one of them dies or stalls.

    Args:
        parallel: This rank's place; the one that is yielded reports what this rank is doing.
        arguments: The command line.
        before_exit: Called before the process ends.
        program: Printed before messages.

    Raises:
        UserError: Rank 0 cannot be reached.
    """
    if parallel.world_size == 1:
        yield parallel
        return
    advice = "Nothing is saved: --save was not given."
    if arguments.save is not None:
        advice = f"Continue from the last save with --load {arguments.save}."
    timeout = arguments.distributed_timeout_minutes * 60
    name = _name(parallel)
    with Liveness(
        parallel.rank, parallel.world_size, name, timeout, advice, before_exit, program
    ) as liveness:
        yield replace(parallel, heartbeat=liveness)


def _name(parallel: Parallel) -> str:
    """What messages call this process."""
    rank, host = parallel.rank, socket.gethostname()
    if not parallel.experts.role:
        return f"rank {rank} (pipeline stage {parallel.pp_rank}, {host})"
    return f"{parallel.experts.role} (rank {rank}, {host})"
