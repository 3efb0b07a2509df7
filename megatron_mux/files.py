"""Atomic and durable file writes, reading of users' JSON, and the location of caches."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_mux.errors import UserError

_AT_ONCE = 1 << 20
"""Bytes that are written by one call."""


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


def write_atomically(
    path: Path, text: str, mode: int = 0o666, check: Callable[[], None] = lambda: None
) -> None:
    """Write to a temporary file, flush to disk, rename: a reader sees either the old file or the new one.

    Args:
        path: The file.
        text: Its content.
        mode: Its permissions, from the first moment on, less the process's umask.
        check: Raises if the file must not be replaced after all; called right before it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    try:
        partial.unlink(missing_ok=True)
        partial.touch(mode)
        write(partial, text.encode())
        check()
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_output(flag: str, path: Path, text: str) -> None:
    """`write_atomically` for the file that a flag names.

    Raises:
        UserError: It cannot be written.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def new_directory(flag: str, output: Path) -> Iterator[Path]:
    """Make a directory that appears complete or not at all.

    Args:
        flag: That names it.
        output: The directory; may exist if it is empty.

    Yields:
        A directory beside it, to fill, which takes its place at the end.

    Raises:
        UserError: It exists and holds something, or the disk is full or not writable.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{flag} {output}: exists already: choose another directory")
    partial = output.with_name(f".partial-{output.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        sync_directory(partial)
        os.rename(partial, output)
        sync_directory(output.absolute().parent)
    except OSError as error:
        raise UserError(f"{flag} {output}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_directory(partial: Path, final: Path) -> None:
    """Let a directory that is filled and flushed to disk take the place of another, or of none, beside it.

    The other one is removed once the new one is there; until then it is beside it, under another name.
    """
    old = final.with_name(f".old-{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    try:
        os.rename(partial, final)
    except OSError:
        if old.exists():
            os.rename(old, final)
        raise
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def prepare_directory(directory: Path, asked: str = "--save") -> str:
    """Make a directory that `asked` names and try to write there; returns the problem, if any."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return f"{asked} {directory}: cannot be written: {error.strerror or error}: choose another directory"


class Pace:
    """Limits how fast files are written, so that others get the disk and the processor meanwhile.

    Args:
        rate: Bytes a second; None: no limit.
    """

    def __init__(self, rate: int | None = None) -> None:
        self.rate = rate
        self._lifted = threading.Event()

    def lift(self) -> None:
        """Lift the limit: somebody waits."""
        self._lifted.set()

    def keep(self, size: int, seconds: float) -> None:
        """Wait until `size` bytes, which took so many seconds to write, may be followed by more."""
        if self.rate is not None:
            self._lifted.wait(max(0.0, size / self.rate - seconds))


def write(path: Path, *content: bytes | memoryview, pace: Pace | None = None) -> None:
    """Write pieces one after the other to a file and flush it to disk."""
    write_pieces(path, content, pace)


def write_pieces(path: Path, content: Iterable[bytes | memoryview], pace: Pace | None = None) -> None:
    """Write pieces one after the other, as they come, to a file and flush it to disk."""
    with open(path, "wb", buffering=0) as file:
        for block in _blocks(content):
            began = time.perf_counter()
            part = memoryview(block)
            while part:
                part = part[file.write(part) :]
            if pace is not None:
                pace.keep(len(block), time.perf_counter() - began)
        os.fsync(file.fileno())


def _blocks(content: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The pieces in blocks of at most `_AT_ONCE` bytes, small ones together: each call interrupts other threads."""
    held, size = list[memoryview](), 0
    for piece in content:
        for start in range(0, len(piece), _AT_ONCE):
            part = memoryview(piece)[start : start + _AT_ONCE]
            if size + len(part) > _AT_ONCE:
                yield b"".join(held)
                held, size = [], 0
            held.append(part)
            size += len(part)
    yield b"".join(held)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk, so that created and renamed files survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
