"""Look after a service: its tenants and their keys, backups. The server may run meanwhile.

megatron-mux serve-admin --state DIR add-tenant NAME        # prints its first key, once
megatron-mux serve-admin --state DIR list
megatron-mux serve-admin --state DIR add-key NAME --days 90
megatron-mux serve-admin --state DIR revoke-key ID
megatron-mux serve-admin --state DIR backup --to BACKUP
megatron-mux serve-admin --state NEWDIR restore --from BACKUP
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mux.arguments.parser import Parser
from megatron_mux.arguments.values import at_least, path
from megatron_mux.cli.serve import INSTALL
from megatron_mux.errors import UserError, exit_status, to_stderr

if TYPE_CHECKING:
    from megatron_mux.serve.database.store import Store
    from megatron_mux.serve.database.tables import Key

PROGRAM = "megatron-mux serve-admin"
_DAY = 86400.0


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.set_defaults(state=None, database="")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="tenants, and which keys they have")
    tenant = actions.add_parser("add-tenant", help="add a tenant; prints its first key")
    tenant.add_argument("name")
    key = actions.add_parser("add-key", help="give a tenant another key, two at most; prints it")
    key.add_argument("name", help="of the tenant")
    key.add_argument("--days", type=at_least(1), metavar="N", help="until it expires (default: never)")
    revoke = actions.add_parser("revoke-key", help="have a key refused from now on")
    revoke.add_argument("key", help="its id, as `list` shows it")
    backup = actions.add_parser("backup", help="keep the database, files and checkpoints elsewhere")
    backup.add_argument("--to", type=path, required=True, metavar="DIR", help="a new directory")
    restore = actions.add_parser("restore", help="make a service of a backup, in --state, a new directory")
    restore.add_argument("--from", dest="backup", type=path, required=True, metavar="DIR", help="the backup")
    for each in (parser, *actions.choices.values()):  # before or after the action
        _add_place(each)
    return parser


def _add_place(parser: argparse.ArgumentParser) -> None:
    add, left_out = parser.add_argument, argparse.SUPPRESS
    add("--state", type=path, default=left_out, metavar="DIR", help="the service's directory")
    add("--database", default=left_out, metavar="URL", help="as for serve (default: SQLite in --state)")


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Do it; returns the exit status, 2 if the input was wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_status(lambda: _work(words, program), program)


def _work(words: Sequence[str], program: str) -> None:
    arguments = build_parser(program).parse_args(words)
    if arguments.state is None:
        raise UserError("--state DIR is missing: the service's directory")
    try:
        from megatron_mux.serve.database.store import Store, sqlite_url
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name}: {INSTALL}") from error
    if arguments.action == "restore":
        _restore(arguments)
        return
    if not arguments.database and not (arguments.state / "service.db").exists():
        raise UserError(
            f"--state {arguments.state}: no service has begun there: start megatron-mux serve first"
        )
    url = arguments.database or sqlite_url(arguments.state)
    if arguments.action == "backup":
        _back_up(arguments, url)
        return
    with closing(Store(url)) as store:
        _act(arguments, store)


def _back_up(arguments: argparse.Namespace, url: str) -> None:
    from sqlalchemy.engine import make_url

    from megatron_mux.serve.backup import back_up

    asked = make_url(url)
    database = Path(asked.database or "")
    if asked.get_backend_name() != "sqlite" or not database.is_file():
        raise UserError(
            f"--database {asked.render_as_string()}: is no file of SQLite: back it up with its own tools"
        )
    kept = back_up(database, arguments.state, arguments.to, to_stderr)
    print(f"{arguments.to}: {kept}")


def _restore(arguments: argparse.Namespace) -> None:
    from megatron_mux.serve.backup import restore

    if arguments.database:
        raise UserError("--database: a backup is restored to SQLite in --state: leave it out")
    kept = restore(arguments.backup, arguments.state, to_stderr)
    print(f"{arguments.state}: {kept}")


def _act(arguments: argparse.Namespace, store: Store) -> None:
    from megatron_mux.serve import keys

    match arguments.action:
        case "list":
            _list(store)
        case "add-tenant":
            print(keys.new_key(store, keys.new_tenant(store, arguments.name)))
        case "add-key":
            lifetime = None if arguments.days is None else arguments.days * _DAY
            print(keys.new_key(store, keys.tenant_id(store, arguments.name), lifetime))
        case "revoke-key":
            keys.revoke_key(store, arguments.key)


def _list(store: Store) -> None:
    from rich.table import Table
    from sqlalchemy import select

    from megatron_mux.console import make_console
    from megatron_mux.serve.database.tables import Key, Tenant

    table = Table("tenant", "key", "made", "state", box=None, pad_edge=False)
    with store.read() as session:
        rows = session.execute(
            select(Tenant, Key).join(Key, isouter=True).order_by(Tenant.name, Key.created_at)
        )
        for tenant, key in rows:
            table.add_row(tenant.name, *(("-", "-", "-") if key is None else _of_key(key)))
    make_console().print(table)


def _of_key(key: Key) -> tuple[str, str, str]:
    made, state = time.strftime("%Y-%m-%d", time.localtime(key.created_at)), "valid"
    if key.expires_at is not None:
        until = time.strftime("%Y-%m-%d", time.localtime(key.expires_at))
        state = f"{'expired on' if key.expires_at <= time.time() else 'valid until'} {until}"
    return key.id, made, "revoked" if key.revoked_at is not None else state
