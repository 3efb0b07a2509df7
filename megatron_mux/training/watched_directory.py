"""A watched directory: task files that appear in it join the run, those that are removed leave."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_mux.engine.agreement import from_first
from megatron_mux.runtime import Parallel

STOP = "STOP"
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Changes:
    """What happened in the directory since the last look.

    Attributes:
        added: Task files that are new, or changed since they were refused.
        removed: Task files that are gone.
        stop: Whether a file named `STOP` is there: end the run once its tasks are done.
    """

    added: tuple[Path, ...]
    removed: tuple[Path, ...]
    stop: bool


@dataclass
class WatchedDirectory:
    """Compares a directory with what it held before; rank 0 reads it, and every rank gets the same changes.

    Attributes:
        directory: Where task files appear; files whose name starts with a dot are left alone, so that a writer can
            write there and rename.
        parallel: Where this rank stands.
    """

    directory: Path
    parallel: Parallel
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def look(self) -> Changes:
        """Compare the directory with the last look. Every rank calls it."""
        now, stop = from_first(self._read() if self.parallel.rank == 0 else ({}, False), self.parallel)
        added = tuple(sorted(path for path, stamp in now.items() if self._seen.get(path) != stamp))
        removed = tuple(sorted(path for path in self._seen if path not in now))
        self._seen = now
        return Changes(added, removed, stop)

    def _read(self) -> tuple[dict[Path, tuple[int, int]], bool]:
        found: dict[Path, tuple[int, int]] = {}
        try:
            for path in sorted(self.directory.iterdir()):
                if path.suffix in _SUFFIXES and not path.name.startswith("."):
                    stat = path.stat()
                    found[path] = (stat.st_mtime_ns, stat.st_size)
            return found, (self.directory / STOP).exists()
        except OSError:
            # A file was moved meanwhile, or the file system failed: no changes now, another look later.
            return dict(self._seen), False
