"""Serve fine-tuning jobs over OpenAI's API, many at once on each backbone.

    megatron-mux serve --backbone smol=DIR --state DIR
    megatron-mux serve --backbone small=DIR --backbone large=DIR --state DIR --instances 2 --mux-fp32

Flags that it does not know are those of training, for each instance: parallel sizes, precision, memory limits.
"""

from __future__ import annotations

import argparse
import logging
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_mux.arguments.parser import Parser
from megatron_mux.arguments.values import at_least, path, share
from megatron_mux.errors import UserError, exit_status, to_stderr

PROGRAM = "megatron-mux serve"
INSTALL = "needs FastAPI, uvicorn, SQLAlchemy and Alembic: pip install 'megatron-mux[serve]'"
_OURS = ("--backbone", "--save", "--load", "--mux-tasks", "--mux-watch")
"""Flags of training that the service chooses."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY = ("0.0.0.0", "::")


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--backbone",
        action="append",
        required=True,
        metavar="NAME=DIR",
        help="a model and its name for clients; may be repeated",
    )
    parser.add_argument(
        "--state", type=path, required=True, metavar="DIR", help="database, files, checkpoints"
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="default: %(default)s"
    )
    parser.add_argument(
        "--tls-cert", type=path, metavar="FILE", help="serve HTTPS by this certificate (PEM, with its chain)"
    )
    parser.add_argument("--tls-key", type=path, metavar="FILE", help="its private key (PEM, not encrypted)")
    parser.add_argument(
        "--plain-http",
        action="store_true",
        help="listen off loopback without TLS: a proxy that has it, or a private network, is between clients and here",
    )
    parser.add_argument(
        "--instances", type=at_least(1), default=1, metavar="N", help="engines at the same time (default: 1)"
    )
    parser.add_argument(
        "--processes", type=at_least(1), default=1, metavar="N", help="ranks of each instance (default: 1)"
    )
    parser.add_argument(
        "--database", default="", metavar="URL", help="SQLAlchemy's (default: SQLite in --state)"
    )
    parser.add_argument(
        "--policy",
        choices=("fair", "fifo"),
        default="fair",
        help="which waiting job comes next (default: %(default)s)",
    )
    parser.add_argument(
        "--completion-share",
        type=share,
        default=0.5,
        metavar="SHARE",
        help="of an instance's time, that completions get while jobs train (default: %(default)s)",
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this server in the header Host; may be repeated",
    )
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Serve; returns the exit status, 2 if the input was wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_status(lambda: _work(words, program), program)


def _work(words: Sequence[str], program: str) -> None:
    arguments, flags = build_parser(program).parse_known_args(words)
    for flag in flags:
        if flag.partition("=")[0] in _OURS:
            raise UserError(f"{flag}: the service chooses that for its instances: leave it out")
    try:
        from megatron_mux.serve.server import serve
        from megatron_mux.serve.settings import Settings
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name}: {INSTALL}") from error
    host, port = _address(arguments.listen)
    _check_reachable(arguments, host)
    settings = Settings(
        state=arguments.state.resolve(),
        backbones=_backbones(arguments.backbone),
        host=host,
        port=port,
        database=arguments.database,
        instances=arguments.instances,
        flags=(*flags, "--completion-share", str(arguments.completion_share)),
        processes=arguments.processes,
        policy=arguments.policy,
        hosts=tuple(arguments.host),
        certificate=arguments.tls_cert,
        key=arguments.tls_key,
    )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    serve(settings, to_stderr)


def _backbones(given: Sequence[str]) -> dict[str, Path]:
    """The backbones by their names."""
    problems, found = [], dict[str, Path]()
    for text in given:
        name, equals, directory = text.partition("=")
        if not equals or not name.strip() or not directory:
            problems.append(f"--backbone {text}: give a name and a directory: NAME=DIR")
        elif ":" in name or not name.isprintable():
            problems.append(f"--backbone {text}: a name has no colon: names of tuned models have")
        elif name in found:
            problems.append(f"--backbone {text}: {name} is given twice")
        elif not Path(directory).is_dir():
            problems.append(f"--backbone {text}: no such directory")
        else:
            found[name] = Path(directory).resolve()
    if problems:
        raise UserError(*problems)
    return found


def _address(text: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen {text}: give HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def _check_reachable(arguments: argparse.Namespace, host: str) -> None:
    """Refuse an address at which keys would be sent in the open, or at which no client could name this server."""
    certificate, key = arguments.tls_cert, arguments.tls_key
    if (certificate is None) != (key is None):
        raise UserError("--tls-cert and --tls-key: give both, or neither")
    if certificate is not None:
        _check_certificate(certificate, key)
    elif not (arguments.plain_http or host in _LOOPBACK):
        raise UserError(
            f"--listen {arguments.listen}: keys would be sent in the open: give --tls-cert and --tls-key, or "
            "--plain-http if only a proxy that has TLS reaches this address"
        )
    if host in _ANY and not arguments.host:
        raise UserError(
            f"--listen {arguments.listen}: say with --host by which name clients call this server"
        )


def _check_certificate(certificate: Path, key: Path) -> None:
    for flag, file in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            file.read_bytes()
        except OSError as error:
            raise UserError(f"{flag} {file}: cannot be read: {error.strerror or error}") from None
    try:
        # Without a password: a server that starts by itself has nobody to ask.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise UserError(
            f"--tls-cert {certificate}, --tls-key {key}: are no PEM files of a certificate and its own key: {error}"
        ) from None
