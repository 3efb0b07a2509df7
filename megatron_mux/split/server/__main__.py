"""The server of split fine-tuning: one frozen body of a backbone that all clients share.

    python -m megatron_mux.split.server --backbone DIR --listen HOST:PORT --tls-dir DIR

`megatron_mux.split.certificates` makes what `--tls-dir` names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_mux.arguments.parser import BACKBONE
from megatron_mux.arguments.values import at_least, model, size
from megatron_mux.errors import UserError, tell
from megatron_mux.library_log import quiet_imports

PROGRAM = "megatron_mux.split.server"
POLICIES = ("on-demand", "auto", "preserve")


def build_parser(program: str = "python -m megatron_mux.split.server") -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=program, description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument_group("backbone").add_argument
    add("--backbone", type=model, required=True, help=BACKBONE, metavar="DIR")
    add(
        "--bf16",
        action="store_true",
        help="compute in bfloat16 (default: fp32 on a CPU, the checkpoint's on a GPU)",
    )
    add("--least-cut-front", default=1, **_count(1, "first layers that every client has itself (1)"))
    add("--least-cut-back", default=0, **_count(0, "last layers that every client has itself (0)"))
    add(
        "--tensor-model-parallel-size",
        default=1,
        **_count(1, "ranks that share each layer, under torchrun (1)"),
    )
    add(
        "--pipeline-model-parallel-size",
        default=1,
        **_count(1, "ranks that layers are divided among, likewise (1)"),
    )
    _add_connections(parser)
    _add_memory(parser)
    _add_operation(parser)
    return parser


def _add_connections(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("connections").add_argument
    add("--listen", required=True, help="address to listen on", metavar="HOST:PORT")
    add("--tls-dir", type=Path, metavar="DIR",
        help="what megatron_mux.split.certificates made, instead of the four files")  # fmt: skip
    add("--tls-cert", type=Path, help="the server's certificate (DIR/server.pem)", metavar="FILE")
    add("--tls-key", type=Path, help="its private key (DIR/server.key)", metavar="FILE")
    add("--client-ca", type=Path, help="CA that signs clients' certificates (DIR/ca.pem)", metavar="FILE")
    add("--client-crl", type=Path, metavar="FILE",
        help="its list of revoked certificates, read again when it changes (crl.pem beside --client-ca)")  # fmt: skip
    add("--max-bytes-in-flight", type=size, default=1 << 30, metavar="SIZE",
        help="bytes that requests take at most until they are answered; a quarter for one client (1GiB)")  # fmt: skip
    add("--max-norm", type=float, default=1e8, metavar="X",
        help="largest norm of a token's hidden state or gradient that clients may send (1e8)")  # fmt: skip
    add("--idle-seconds", type=float, default=600.0, metavar="S",
        help="save a session and free its memory when its client has been away so long (600)")  # fmt: skip
    add("--max-sessions", default=256, **_count(1, "most sessions in memory at once (256)"))
    add("--max-sessions-each", default=64, **_count(1, "of these, most of one client (64)"))
    add("--max-memory-each", type=_part, default=0.5, metavar="X",
        help="part of the memory beside the weights that the sessions of one client may have (0.5)")  # fmt: skip
    add("--max-runs-each", default=256, **_count(1, "runs of one client whose states are kept on disk (256)"))


def _add_memory(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("memory and order").add_argument
    add("--memory-limit", type=size, metavar="SIZE",
        help="memory for weights, adapters and requests on each rank (90%% of a GPU; 80%% of free memory)")  # fmt: skip
    add("--policy", choices=POLICIES, default="on-demand",
        help="what is kept between a forward pass and its backward: on-demand: its input, and it is computed again; "
        "preserve: its graph; auto: its graph where memory is free (on-demand)")  # fmt: skip
    add("--swap-rate", type=size, default=8 << 30, metavar="SIZE",
        help="bytes a second from a GPU to host memory and back, for auto (8GiB)")  # fmt: skip
    add("--reservations", choices=("menos", "easy"), default="menos",
        help="menos: the paper's backfilling; easy: it may not delay the first in the queue")  # fmt: skip
    add("--ageing", type=float, default=0.0, metavar="X",
        help="with --weights: tokens of others that a second of waiting outweighs (0: shares alone)")  # fmt: skip
    add("--weights", type=Path, metavar="FILE", help='JSON of each client\'s share: {"NAME": 2.0, ...}')
    add(
        "--rate-limit",
        type=float,
        metavar="N",
        help="most rows a second that are computed for each client, forward and backward passes each counted (none)",
    )
    add("--co-batching", action=argparse.BooleanOptionalAction, default=True,
        help="compute requests of several clients as one micro-batch where that is faster (default)")  # fmt: skip


def _add_operation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("operation").add_argument
    add("--save", type=Path, default=Path("split-server"), metavar="DIR",
        help="keep sessions' states here; clients go on from them after a restart (split-server)")  # fmt: skip
    add(
        "--break-lock",
        action="store_true",
        help="take over a --save directory that a dead process has locked",
    )
    add("--keep-body", action="store_true", help="keep the body's part of adapters: clients do not get it")
    add("--metrics", metavar="HOST:PORT", help="answer Prometheus here (default: nowhere)")
    add("--log-format", choices=("text", "json"), default="text")
    add("--no-progress", action="store_true", help="no live table")
    add("--grace-seconds", type=float, default=30.0, metavar="S",
        help="on SIGTERM, wait so long for steps that have begun (30)")  # fmt: skip


def _part(text: str) -> float:
    """A number above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return value


def _count(least: int, text: str) -> dict[str, Any]:
    return {"type": at_least(least), "metavar": "N", "help": text}


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Parse the command line and serve until SIGTERM or SIGINT.

    Returns:
        Exit status: 0; 2 if the input is wrong.
    """
    arguments = (build_parser(program) if program else build_parser()).parse_args(argv)
    quiet_imports()
    with ExitStack() as cleanup:
        try:
            check_files(arguments)
            from megatron_mux.runtime import shutdown  # imports torch: seconds
            from megatron_mux.split.server.run import run

            cleanup.callback(shutdown)
            run(arguments, program or PROGRAM)
        except UserError as error:
            tell(error, program or PROGRAM)  # before the groups are left: see `tell`
            return 2
    return 0


def check_files(arguments: argparse.Namespace) -> None:
    """Fill in files of `--tls-dir`; raise a `UserError` if one is not there."""
    home = arguments.tls_dir
    for name, file in (("tls_cert", "server.pem"), ("tls_key", "server.key"), ("client_ca", "ca.pem")):
        path, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if path is None and home is None:
            raise UserError(
                f"{flag}: is missing: give --tls-dir DIR, or --tls-cert, --tls-key and --client-ca"
            )
        if path is None:
            path, flag = home / file, "--tls-dir"
            setattr(arguments, name, path)
        if not path.is_file():
            raise UserError(f"{flag} {path}: no such file: `megatron-mux split-certificates` makes them")


if __name__ == "__main__":
    sys.exit(main())
