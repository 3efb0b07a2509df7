"""Train the tasks of a file at once on one frozen backbone.

    megatron-mux train tasks.yaml --backbone DIR
    megatron-mux train tasks.yaml --backbone org/name --gpus 4 --tensor-model-parallel-size 2 --save runs/first
    torchrun --nnodes 2 ... -m megatron_mux.cli train tasks.yaml --backbone DIR --save runs/first

On several processes of this machine it starts them itself: as many as `--gpus` or `--processes` says, else as many as
tensor, pipeline and expert parallelism need. Those that are left over are data parallel.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_mux.arguments import MuxArguments
from megatron_mux.arguments.parser import arguments_of, parse
from megatron_mux.arguments.parser import build_parser as build_run_parser
from megatron_mux.arguments.values import path
from megatron_mux.cli.launch import (
    add_process_flags,
    is_launched,
    process_count,
    processes_needed,
    run_here,
    run_processes,
)
from megatron_mux.directory_lock import refuse_if_held
from megatron_mux.errors import UserError, tell
from megatron_mux.library_log import LibraryLog

PROGRAM = "megatron-mux train"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line: that of `pretrain_mux.py`, the task file, and how many processes."""
    parser = build_run_parser()
    parser.prog, parser.usage = program, f"{program} TASKS --backbone DIR [--gpus N] [flags]"
    parser.add_argument("tasks", nargs="?", type=path, metavar="TASKS", help="tasks.yaml, as --mux-tasks")
    add_process_flags(parser, "default: as many as the parallel sizes need")
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Train; returns the exit status, see `train_here`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if is_launched():
        return train_here(lambda: plan_run(words, program)[0], program)
    try:
        arguments, count = plan_run(words, program)
        if arguments.save is not None and not arguments.break_lock:
            refuse_if_held(arguments.save)
        if count > 1:
            if arguments.save is not None and not any(word.partition("=")[0] == "--save" for word in words):
                words += ["--save", str(arguments.save)]
            return run_processes(["train", *words], count, program, arguments.save)
    except UserError as error:
        tell(error, program)
        return 2
    return train_here(lambda: arguments, program)


def train_here(make_arguments: Callable[[], MuxArguments], program: str) -> int:
    """Train in this process, one of those that a launcher has started or the only one.

    Args:
        make_arguments: Parses the command line.
        program: Printed before messages.

    Returns:
        Exit status: 0; 2 if the input is wrong (one process prints the error, the others exit silently); 130 after an
        interrupt while no task was training.
    """

    def work() -> None:
        arguments = make_arguments()
        with LibraryLog(wanted=not arguments.mux_no_progress):
            from megatron_mux.training.run import run  # imports torch: seconds

            run(arguments, program)

    try:
        return run_here(work, program)
    except KeyboardInterrupt:  # while tasks train, the loop takes signals: it saves first
        if os.environ.get("RANK", "0") == "0":
            print(f"{program}: interrupted: no task was training", file=sys.stderr)
        return 130


def plan_run(words: Sequence[str], program: str) -> tuple[MuxArguments, int]:
    """Parse and check a command line.

    Args:
        words: The flags.
        program: The name in `--help`.

    Returns:
        The run's arguments, and the number of processes on this machine.

    Raises:
        UserError: The flags are wrong, or their sizes do not divide the processes.
    """
    parsed = parse(build_parser(program), words)
    if parsed["tasks"] is not None:
        if parsed["mux_tasks"] is not None:
            raise UserError(f"--mux-tasks {parsed['mux_tasks']}: {parsed['tasks']} is the task file already")
        parsed["mux_tasks"] = parsed["tasks"]
    if parsed["save"] is None:
        parsed["save"] = parsed["load"]
    chosen = (
        parsed["save"] is None and not is_launched()
    )  # processes of a launcher would not agree on a new one
    if chosen:
        parsed["save"] = new_run_directory(parsed["mux_tasks"] or parsed["mux_watch"])
    arguments = arguments_of(parsed)
    needed = 1 + arguments.expert_managers if arguments.expert_managers else processes_needed(arguments)
    count = process_count(argparse.Namespace(**parsed), needed)
    if count > 1 and not is_launched():
        _check_sizes(arguments, count)
    if chosen:
        print(f"no --save: saving to {arguments.save}", flush=True)
    return arguments, count


def new_run_directory(tasks: Path | None) -> Path:
    """A directory below `runs` that no run has used, named after the task file: `runs/tasks`, `runs/tasks-2`, ..."""
    base = Path("runs", tasks.stem if tasks is not None else "run")
    number, directory = 1, base
    while directory.exists() and (
        not directory.is_dir() or any(child.is_dir() for child in directory.iterdir())
    ):
        number += 1
        directory = base.with_name(f"{base.name}-{number}")
    return directory


def _check_sizes(arguments: MuxArguments, count: int) -> None:
    """Refuse parallel sizes that do not divide the processes, before any is started."""
    from megatron_mux.world import check_sizes

    check_sizes(
        count,
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.sequence_parallel,
        arguments.expert_model_parallel_size,
        arguments.expert_tensor_parallel_size or 1,
        0 if arguments.mux_expert_managers == "auto" else arguments.expert_managers,
    )
