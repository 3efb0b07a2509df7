"""What a client notes beside its saves of a task: the run's name on the server, and whose run it is."""

from __future__ import annotations

import secrets
from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.files import write_atomically

_FILE = "split-run"


def _read(directory: Path | None, task: str) -> tuple[str, str]:
    """The run's name and the client's identity; empty where nothing says them."""
    file = None if directory is None else directory / task / _FILE
    if file is None or not file.is_file():
        return "", ""
    run, _, client = file.read_text().strip().partition(" ")
    return run, client


def refuse_other_clients(flag: str, directory: Path | None, task: str, client: str) -> None:
    """Refuse a directory that holds another client's run of a task.

    Args:
        flag: That names the directory.
        directory: Of saves; None: there is none.

    Raises:
        UserError: It holds one.
    """
    _, other = _read(directory, task)
    if directory is not None and other not in ("", client):
        raise UserError(
            f"{flag} {directory}: {directory / task} is of the client {other}, and this client is {client}: choose "
            "another directory, or another name for the task"
        )


def name_run(source: Path | None, task: str) -> str:
    """The name of a run on the server, so that only this run goes on from its saves there.

    Args:
        source: Directory of the saves that the run continues; None: it begins, with a new name.
    """
    return _read(source, task)[0] or secrets.token_hex(16)


def note_run(save: Path, task: str, run: str, client: str) -> None:
    """Note a client's run beside its saves."""
    write_atomically(save / task / _FILE, f"{run} {client}\n")
