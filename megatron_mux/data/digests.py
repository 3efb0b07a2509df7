"""Digests of data files, each remembered beside the token cache's entries: an unchanged file is hashed once.

A file is the one that was hashed as long as its path, size, times and inode are. Times are only as fine as the file
system keeps them, so, as in git, a file that was written to a moment ago is not remembered for other processes. Within
a process it is: one that is replaced by as many bytes, in place, within that moment, goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from megatron_mux.data.sources.source import Source
from megatron_mux.data.token_cache import DIGESTS, locked
from megatron_mux.files import write_atomically

_SETTLED_NS = 2_000_000_000
"""The coarsest times of a file system are two seconds."""

_hashed: dict[str, str] = {}
"""Digests that this process knows, by `_identity`."""


def file_digest(cache: Path, file: Source) -> str:
    """SHA-256 of a data file; of several processes of a host that ask for it, one reads the file.

    Args:
        cache: See `token_cache_directory`.
        file: The open file.

    Raises:
        UserError: It cannot be read.
    """
    identity = _identity(file)
    if identity in _hashed:
        return _hashed[identity]
    name = hashlib.sha256(os.fsencode(os.path.realpath(file.path))).hexdigest()[:32]
    index = cache / DIGESTS / name
    found = _remembered(index, identity)
    if found is None:
        with locked(cache / f".{name}.lock"):
            found = _remembered(index, identity) or _hash(index, identity, file)
    if _identity(file) == identity:  # else it was written to meanwhile
        _hashed[identity] = found
    return found


def _identity(file: Source) -> str:
    about = os.fstat(file.file.fileno())
    times = about.st_mtime_ns, about.st_ctime_ns
    return json.dumps([os.path.realpath(file.path), about.st_size, *times, about.st_ino])


def _remembered(index: Path, identity: str) -> str | None:
    try:
        known = json.loads(index.read_text())
        os.utime(index)  # it is in use
        return str(known["sha256"]) if known["file"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _hash(index: Path, identity: str, file: Source) -> str:
    """Hash a file, and remember it if it cannot have changed meanwhile."""
    about, began = os.fstat(file.file.fileno()), time.time_ns()
    found = file.digest()
    settled = began - max(about.st_mtime_ns, about.st_ctime_ns) > _SETTLED_NS
    if settled and _identity(file) == identity:
        with suppress(OSError):  # it is hashed again then
            write_atomically(index, json.dumps({"file": identity, "sha256": found}))
    return found
