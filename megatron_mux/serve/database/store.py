"""Sessions on the database: any number of readers, one writer at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from megatron_mux.errors import UserError
from megatron_mux.serve.database.migrations import upgrade

_SECONDS_TO_WAIT = 30.0
"""For a lock on the database that another process holds, such as a backup."""
_CONNECTIONS = 32
"""Kept open; as many again may come for a moment. Requests are handled by at most 40 threads."""


class Store:
    """The database of a service.

    Args:
        url: SQLAlchemy's; see `sqlite_url`.

    Raises:
        UserError: It cannot be opened, or its schema is newer than this version.
    """

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self._writer = threading.Lock()
        upgrade(self._engine)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that changes nothing."""
        with Session(self._engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session whose changes are committed at the end of the block, all or none of them.

        Blocks follow each other, so that none of them finds the database locked: they are short, and wait for nothing.
        """
        with self._writer, Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def sqlite_url(directory: Path) -> str:
    """The URL of the database that a service has in its own directory."""
    return f"sqlite:///{directory / 'service.db'}"


def _engine(url: str) -> Engine:
    if make_url(url).get_backend_name() != "sqlite":
        return create_engine(url, pool_size=_CONNECTIONS, max_overflow=_CONNECTIONS, pool_pre_ping=True)
    path = make_url(url).database
    try:
        if path and not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # it holds what tenants sent
    except OSError as error:
        raise UserError(f"{path}: cannot be made: {error.strerror}") from error
    engine = create_engine(
        url,
        pool_size=_CONNECTIONS,
        max_overflow=_CONNECTIONS,
        connect_args={"check_same_thread": False, "timeout": _SECONDS_TO_WAIT},
    )
    event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: Any) -> None:
    """Have readers not wait for the writer, what is committed survive a power failure, and references be checked."""
    cursor = connection.cursor()
    for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()
