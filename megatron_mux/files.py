"""Files that are whole or not there, whatever happens while they are written; users' JSON; where caches are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_mux.errors import UserError


def cache_directory(kind: str) -> Path:
    """Where what is kept between runs is: `$MEGATRON_MUX_CACHE`, else the user's cache directory.

    Args:
        kind: What is kept: a directory of its own.
    """
    given = os.environ.get("MEGATRON_MUX_CACHE")
    if given:
        return Path(given) / kind
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "megatron-mux" / kind


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: It is not there, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return content


def write_atomically(path: Path, text: str) -> None:
    """Write, flush to disk, rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    try:
        write(partial, text.encode())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write(path: Path, content: bytes) -> None:
    """Write and flush to disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's names to disk: what was created in it or renamed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
