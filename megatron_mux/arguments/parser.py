"""The parser of the command line, and its messages for flags that it does not have."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from megatron_mux.arguments.checks import contradictions
from megatron_mux.arguments.flag import DIRECTORY, MODEL
from megatron_mux.arguments.megatron_flags import MEGATRON_FLAGS, flags_by
from megatron_mux.arguments.model import MuxArguments, add_flags
from megatron_mux.arguments.shape_flags import SHAPE_FLAGS
from megatron_mux.arguments.values import destination, only, path, size
from megatron_mux.errors import UserError

BACKBONE = "Hugging Face directory, or org/name in the Hugging Face cache"
"""Help of `--backbone`."""
ADAPTER = "in PEFT's format; of a task's or run's directory the newest checkpoint"
"""Help of flags that name an adapter."""


class _WithoutEffect(argparse.Action):
    """Notes that the flag was given, whatever its value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = dict.fromkeys([*getattr(namespace, self.dest), str(option_string)])
        setattr(namespace, self.dest, tuple(given))


class Parser(argparse.ArgumentParser):
    """Raises `UserError` where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        extra = message.removeprefix("unrecognized arguments: ")
        if extra != message:
            raise UserError(f"{extra}: unexpected: every value belongs right after its flag")
        raise UserError(message.removeprefix("argument "))


def add_path(parser: Parser, flag: str, metavar: str, text: str, required: bool = False) -> None:
    """Add a path that may be given by itself or after its flag.

    Args:
        parser: Of a command.
        flag: Such as `--tasks`; names the result, too.
        metavar: For `--help`.
        text: For `--help`.
        required: Whether it must be given.
    """
    either = parser.add_mutually_exclusive_group(required=required)
    of_flag = either.add_argument(flag, type=path, metavar=metavar, help=text)
    either.add_argument(
        f"{of_flag.dest}_alone", nargs="?", action=_Alone, type=path, metavar=metavar, help=f"as {flag}"
    )


class _Alone(argparse.Action):
    """Keeps what is given by itself where the flag keeps its value."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """See `argparse.Action`."""
        if values is not None:
            setattr(namespace, self.dest.removesuffix("_alone"), values)


def adapter_parser(program: str, description: str) -> tuple[Parser, Callable[..., argparse.Action]]:
    """Make the parser of a tool that makes something of an adapter and its backbone.

    Returns:
        The parser with `--backbone`, `--adapter` and `--json`, and its `add_argument`.
    """
    parser = Parser(prog=program, description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--backbone", **MODEL, required=True, help=BACKBONE)
    add("--adapter", **DIRECTORY, required=True, help=f"adapter, {ADAPTER}")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return parser, add


def add_shard_size(add: Callable[..., argparse.Action]) -> None:
    """Add the flag of commands that write a Hugging Face directory; `add` is a parser's `add_argument`."""
    add(
        "--max-shard-size",
        type=size,
        default=5_000_000_000,
        metavar="SIZE",
        help="most bytes of a safetensors file (5GB)",
    )


def parse_args(argv: Sequence[str] | None = None) -> MuxArguments:
    """Parse and check a command line.

    Args:
        argv: Words without the program's name; by default those of this process.

    Returns:
        The arguments. Whether sizes fit the number of processes and the backbone is checked where these are
        known.

    Raises:
        UserError: Unknown or refused flags (all of them at once), or invalid values.
    """
    return arguments_of(parse(build_parser(), sys.argv[1:] if argv is None else argv))


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Parse a command line of a run, by the names of `MuxArguments`.

    Args:
        parser: That of `build_parser`; may have further flags.
        argv: Words without the program's name.

    Raises:
        UserError: Unknown or refused flags (all of them at once), or invalid values.
    """
    known = {option for action in parser._actions for option in action.option_strings}
    given = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--") and word != "--")
    unknown = [_refusal(flag, known) for flag in given if flag not in known]
    if unknown:
        raise UserError(*unknown)
    return vars(parser.parse_args(argv))


def arguments_of(parsed: Mapping[str, Any]) -> MuxArguments:
    """Check what `parse` returns.

    Raises:
        UserError: Flags contradict each other or the file system.
    """
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
    """The parser of `parse_args`, with the full text of `--help`."""
    parser = Parser(
        prog="pretrain_mux.py",
        usage="torchrun --nproc-per-node N pretrain_mux.py --backbone DIR --mux-tasks FILE [flags]",
        description="Fine-tune many PEFT tasks at once on one frozen Megatron-Core backbone.",
        epilog="Batch size, learning rate, steps and data are each task's own: see tasks.yaml.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38, width=100),
    )
    for section in ("backbone", "parallelism", "pipeline stages", "results", "mux"):
        add_flags(parser, section)
    group = parser.add_argument_group(
        "shape",
        "Defined by --backbone; accepted so that existing scripts work, and checked against it: "
        f"{', '.join(SHAPE_FLAGS)}.",
    )
    for name, shape in SHAPE_FLAGS.items():
        if shape.type is bool:
            group.add_argument(name, action="store_true", help=argparse.SUPPRESS)
        else:
            group.add_argument(name, type=shape.type, metavar="VALUE", help=argparse.SUPPRESS)
    group = parser.add_argument_group("accepted only with their fixed value")
    for name, flag in flags_by("fixed").items():
        group.add_argument(name, type=only(flag.value, flag.reason), metavar=flag.value, help=flag.reason)
    group = parser.add_argument_group(
        "without effect",
        "More flags of Megatron are accepted so that existing scripts work; a run names those given.",
    )
    numbers: dict[str, int | str | None] = {"": 0, "VALUE": None, "VALUE...": "*"}
    for name, flag in flags_by("without effect").items():
        group.add_argument(
            name,
            action=_WithoutEffect,
            dest="without_effect",
            default=(),
            nargs=numbers[flag.value],
            help=argparse.SUPPRESS,
        )
    return parser


def add_mux_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--mux-*` group; an existing Megatron script may take it as its `extra_args_provider`.

    Returns:
        The same parser, as Megatron expects.
    """
    add_flags(parser, "mux")
    return parser


def _refusal(flag: str, known: set[str]) -> str:
    """The message for a flag that the parser does not have."""
    megatrons = MEGATRON_FLAGS.get(flag)
    if megatrons is not None and megatrons.treatment == "per task":
        return f"{flag}: this is per task: see tasks.yaml ({megatrons.reason})"
    if megatrons is not None:
        return f"{flag}: {megatrons.reason}"
    spelling = flag.lower().replace("_", "-")
    alike = [name for name in known | MEGATRON_FLAGS.keys() if name.startswith(spelling[:5])]
    near = difflib.get_close_matches(spelling, alike, n=1, cutoff=0.85)
    if near:
        return f"{flag}: unknown flag: did you mean {near[0]}?"
    return f"{flag}: is not supported: remove it (--help lists all flags)"
