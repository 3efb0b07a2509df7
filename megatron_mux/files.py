"""Atomic and durable file writes, reading of users' JSON, and the location of caches."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_mux.errors import UserError


def cache_directory(kind: str) -> Path:
    """The directory of a cache: below `$MEGATRON_MUX_CACHE` if set, else below the user's cache directory.

    Args:
        kind: Name of the cache, its subdirectory.
    """
    given = os.environ.get("MEGATRON_MUX_CACHE")
    if given:
        return Path(given) / kind
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "megatron-mux" / kind


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: The file is missing, is not JSON, or does not hold an object.
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
    """Write to a temporary file, flush to disk, rename: a reader sees either the old file or the new one."""
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
    """Write a file and flush it to disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk, so that created and renamed files survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
