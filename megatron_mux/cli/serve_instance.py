"""An engine of a service: trains the jobs that `megatron-mux serve`, which starts it, gives it.

    torchrun --nproc-per-node N -m megatron_mux.cli serve-instance --instance NAME --server SOCKET --root DIR \
        --backbone DIR --save DIR [flags of training]

The environment variable MEGATRON_MUX_INSTANCE_TOKEN holds what the server knows it by.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing

from megatron_mux.arguments.parser import arguments_of, parse
from megatron_mux.arguments.parser import build_parser as build_run_parser
from megatron_mux.arguments.values import path, share
from megatron_mux.cli.launch import run_here
from megatron_mux.errors import UserError
from megatron_mux.library_log import LibraryLog

PROGRAM = "megatron-mux serve-instance"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line: that of `pretrain_mux.py`, and where the server is."""
    parser = build_run_parser()
    usage = (
        f"{program} --instance NAME --server SOCKET --root DIR --backbone DIR --save DIR [flags of training]"
    )
    parser.prog, parser.usage = program, usage
    group = parser.add_argument_group("service")
    group.add_argument("--instance", required=True, help="its name")
    group.add_argument("--server", type=path, required=True, help="the server's Unix socket")
    group.add_argument("--root", type=path, required=True, help="the service's directory")
    group.add_argument(
        "--completion-share",
        type=share,
        default=0.5,
        metavar="SHARE",
        help="of the time, that completions get while jobs train (0.5)",
    )
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Train jobs until the server says that there are no more; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_here(lambda: _work(words, program), program)


def _work(words: Sequence[str], program: str) -> None:
    parsed = parse(build_parser(program), words)
    arguments = arguments_of(parsed)
    if arguments.save is None or arguments.mux_tasks is not None:
        raise UserError("--save, and no task file: an instance gets its tasks from the server")
    from megatron_mux.serve.channel.messages import TOKEN_VARIABLE
    from megatron_mux.serve.instance.completions import Completions  # imports torch: seconds
    from megatron_mux.serve.instance.connection import Connection
    from megatron_mux.serve.instance.held import HeldJobs
    from megatron_mux.serve.instance.saves import RunFiles
    from megatron_mux.serve.instance.states import TellsStates
    from megatron_mux.training.run import run

    jobs, token = HeldJobs(arguments.save), os.environ.pop(TOKEN_VARIABLE, "")
    files = RunFiles(jobs, parsed["root"])
    connection = Connection(parsed["server"], parsed["instance"], token, jobs, files)
    jobs.on_first_poll = connection.start  # on the first rank alone: it is ready
    speaks = os.environ.get("RANK", "0") == "0"
    states = TellsStates(jobs if speaks else None)
    completions = Completions(parsed["root"], connection.send if speaks else None, parsed["completion_share"])
    completions.arrived = connection.arrived
    with LibraryLog(wanted=not arguments.mux_no_progress), closing(connection):
        run(arguments, program, commands=jobs, callbacks=[states, completions])
