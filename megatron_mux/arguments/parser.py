"""The parser: which flags there are, and what is said of the others."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NoReturn

from megatron_mux.arguments.checks import contradictions
from megatron_mux.arguments.megatron_flags import MEGATRON_FLAGS, PER_TASK, REASONS
from megatron_mux.arguments.model import MuxArguments
from megatron_mux.arguments.pipeline_flags import add_pipeline_flags
from megatron_mux.arguments.shape_flags import SHAPE_FLAGS
from megatron_mux.arguments.values import (
    POLICIES,
    at_least,
    chunk_size,
    destination,
    memory_limit,
    minutes,
    only,
    path,
    policy,
)
from megatron_mux.errors import UserError

# Flags that are taken only with the value that holds anyway, and why no other.
_FIXED: Mapping[str, tuple[str, str]] = {
    "--context-parallel-size": ("1", "context parallelism is not done yet"),
    "--expert-model-parallel-size": ("1", "backbones with experts are not done yet"),
    "--expert-tensor-parallel-size": ("1", "backbones with experts are not done yet"),
    "--hidden-dropout": ("0", "the backbone's own dropout is off; an adapter's is in tasks.yaml"),
    "--attention-dropout": ("0", "the backbone's own dropout is off; an adapter's is in tasks.yaml"),
    "--recompute-method": ("uniform", "every layer is recomputed by itself"),
    "--recompute-num-layers": ("1", "every layer is recomputed by itself"),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong as a `UserError` instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        extra = message.removeprefix("unrecognized arguments: ")
        if extra != message:
            raise UserError(f"{extra}: unexpected: every value belongs right after its flag")
        raise UserError(message.removeprefix("argument "))


def parse_args(argv: Sequence[str] | None = None) -> MuxArguments:
    """Parse and check a command line.

    Args:
        argv: Without the program's name; by default this process's.

    Returns:
        The arguments. Whether sizes fit the number of processes and the backbone is checked where these are
        known.

    Raises:
        UserError: Unknown or refused flags (all of them at once), or values that cannot be.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    known = {option for action in parser._actions for option in action.option_strings}
    given = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--") and word != "--")
    unknown = [_refusal(flag, known) for flag in given if flag not in known]
    if unknown:
        raise UserError(*unknown)
    parsed = vars(parser.parse_args(argv))
    shape = {flag: parsed[destination(flag)] for flag in SHAPE_FLAGS}
    arguments = MuxArguments(
        shape={flag: value for flag, value in shape.items() if value is not None and value is not False},
        **{field.name: parsed[field.name] for field in fields(MuxArguments) if field.name != "shape"},
    )
    problems = contradictions(arguments, parsed)
    if problems:
        raise UserError(*problems)
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser behind `parse_args`, with everything that `--help` shows."""
    parser = Parser(
        prog="pretrain_mux.py",
        usage="torchrun --nproc-per-node N pretrain_mux.py --backbone DIR --mux-tasks FILE [flags]",
        description="Fine-tune many PEFT tasks at once on one frozen Megatron-Core backbone.",
        epilog="Batch size, learning rate, steps and data are each task's own: see tasks.yaml.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38, width=100),
    )
    group = parser.add_argument_group("backbone")
    add = group.add_argument
    add(
        "--backbone",
        type=path,
        metavar="DIR",
        help="Hugging Face directory: config.json, safetensors files, tokenizer",
    )
    add(
        "--bf16", action="store_true", help="run the backbone in bfloat16 (default: fp32); adapters stay fp32"
    )
    add(
        "--recompute-granularity",
        choices=("full", "selective"),
        help="compute again instead of keeping (default: keep)",
    )
    _add_parallel(parser)
    add_pipeline_flags(parser)
    _add_results(parser)
    add_mux_args(parser)
    group = parser.add_argument_group(
        "shape",
        f"Settled by --backbone; taken so that existing scripts work, and held against it: {', '.join(SHAPE_FLAGS)}.",
    )
    for name, flag in SHAPE_FLAGS.items():
        if flag.type is bool:
            group.add_argument(name, action="store_true", help=argparse.SUPPRESS)
        else:
            group.add_argument(name, type=flag.type, metavar="VALUE", help=argparse.SUPPRESS)
    group = parser.add_argument_group("taken only with the value that holds anyway")
    for name, (value, why) in _FIXED.items():
        group.add_argument(name, type=only(value, why), metavar=value, help=why)
    return parser


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("parallelism").add_argument
    add(
        "--tensor-model-parallel-size",
        type=at_least(1),
        default=1,
        metavar="N",
        help="ranks that share each layer (1)",
    )
    add(
        "--pipeline-model-parallel-size",
        type=at_least(1),
        default=1,
        metavar="N",
        help="pipeline stages (1)",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="divide rows among tensor ranks outside the sharded operators",
    )
    add("--distributed-backend", choices=("nccl", "gloo"), help="default: nccl on GPUs, gloo on CPUs")
    add(
        "--distributed-timeout-minutes",
        type=minutes,
        default=10,
        metavar="M",
        help="a process that keeps others waiting longer makes all of them stop (10)",
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--save", type=path, metavar="DIR", help="leave adapters, metrics, plan and schedule there")
    add("--load", type=path, metavar="DIR", help="continue the run saved there (an empty DIR starts anew)")
    add(
        "--save-interval", type=at_least(1), metavar="N", help="save every N steps of a task, besides at its end",
    )  # fmt: skip
    add(
        "--log-interval",
        type=at_least(1),
        default=10,
        metavar="N",
        help="a line every N steps of a task (10)",
    )
    add("--tensorboard-dir", type=path, metavar="DIR", help="write TensorBoard files there")
    add("--seed", type=at_least(0), default=1234, metavar="N", help="of the run (1234); tasks have their own")


def add_mux_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--mux-*` group; an existing Megatron script may take it as its `extra_args_provider`.

    Args:
        parser: Any parser.

    Returns:
        The same parser, as Megatron expects.
    """
    add = parser.add_argument_group("mux").add_argument
    add("--mux-tasks", type=path, metavar="FILE", help="tasks.yaml: the tasks to train")
    add(
        "--mux-policy", type=policy, default="auto", metavar="{" + ",".join(POLICIES) + "}",
        help="auto: planned by predicted cost (default); serial: one task to its end, then the next; temporal: in "
        "each step one task after the other; spatial: all tasks in one batch",
    )  # fmt: skip
    add(
        "--mux-plan",
        type=path,
        metavar="FILE",
        help="begin with this plan (tools/plan.py --output FILE makes one)",
    )
    add(
        "--mux-memory-limit", type=memory_limit, default="auto", metavar="SIZE",
        help="what a rank may use, such as 40GiB: the planner keeps to it; auto: a GPU's memory less a margin, on a "
        "CPU no limit (default); none: no limit",
    )  # fmt: skip
    add(
        "--mux-chunk-size", type=chunk_size, default="auto", metavar="N",
        help="cut packs into chunks of N tokens; none: not at all; auto: by predicted cost (default)",
    )  # fmt: skip
    add(
        "--mux-align", choices=("dense", "max-length", "longest"), default="dense",
        help="dense: no padding (default); max-length: pad sequences to their task's max_length; longest: to the "
        "longest of all tasks",
    )  # fmt: skip
    add(
        "--mux-backbone-weights", choices=("resident", "sharded", "offloaded", "sharded-offloaded"),
        default="resident",
        help="between uses. resident: on the device (default); sharded: divided over data-parallel ranks; offloaded: "
        "in host memory; sharded-offloaded: divided, in host memory",
    )  # fmt: skip
    add(
        "--mux-watch", type=path, metavar="DIR",
        help="a task file dropped into DIR joins the run, one moved out leaves; a file named STOP ends it",
    )  # fmt: skip
    add(
        "--mux-data-cache", type=path, metavar="DIR",
        help="keep tokenised data files there (default: in $MEGATRON_MUX_CACHE or the user's cache directory)",
    )  # fmt: skip
    add(
        "--mux-micro-batches", type=at_least(1), metavar="N",
        help="parts a step is computed in (default: planned)",
    )  # fmt: skip
    add(
        "--mux-keep-checkpoints", type=at_least(1), metavar="N",
        help="saves to keep, with each task's last good checkpoint (default: all)",
    )  # fmt: skip
    add(
        "--mux-rolling", action=argparse.BooleanOptionalAction, default=True,
        help="let a task's next step begin while other tasks drain, without a flush of the pipeline (default)",
    )  # fmt: skip
    add("--mux-no-progress", action="store_true", help="no live display")
    return parser


def _refusal(flag: str, known: set[str]) -> str:
    """What to say of a flag that the parser does not have."""
    if flag in PER_TASK:
        return f"{flag}: this is per task: see tasks.yaml ({PER_TASK[flag]})"
    if flag in REASONS:
        return f"{flag}: {REASONS[flag]}"
    if flag in MEGATRON_FLAGS:
        return f"{flag}: is a Megatron flag that megatron-mux does not honour: leave it out"
    spelling = flag.lower().replace("_", "-")
    near = difflib.get_close_matches(spelling, known, n=1, cutoff=0.7)
    near = near or difflib.get_close_matches(spelling, MEGATRON_FLAGS, n=1, cutoff=0.85)
    return f"{flag}: unknown flag" + (
        f": did you mean {near[0]}?" if near else ": see --help for what there is"
    )
