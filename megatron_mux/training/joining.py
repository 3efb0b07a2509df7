"""Task files that appear in the watched directory join the run once their data are tokenised; removed ones leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_mux.data.background import BackgroundTokenising
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenised_file import Reading
from megatron_mux.engine.agreement import everyones, from_first
from megatron_mux.launcher import is_local_leader
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec

STOP = "STOP"
_SUFFIXES = (".yaml", ".yml")


@dataclass
class JoiningFile:
    """A task file whose data are being tokenised.

    Attributes:
        path: The task file.
        specs: Its tasks.
        process: Tokenises their data; None while it has not begun, and on ranks that leave it to their host's leader.
    """

    path: Path
    specs: list[TaskSpec]
    process: BackgroundTokenising | None = None

    @property
    def data(self) -> list[Reading]:
        """What is read for the tasks: training data, then held-out data."""
        training = [Reading(own, spec.training.loss) for spec in self.specs for own in spec.data.sources]
        held_out = [Reading(spec.eval.source, spec.training.loss) for spec in self.specs if spec.eval]
        return training + held_out


@dataclass
class JoiningFiles:
    """Task files in the order in which they appeared; the data of the first are being tokenised, by one rank a host.

    All ranks have the same files.

    Attributes:
        files: Opens data.
        parallel: Where this rank stands.
    """

    files: DataFiles
    parallel: Parallel
    _queue: deque[JoiningFile] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def names(self) -> list[str]:
        """The tasks of all files."""
        return [spec.name for file in self._queue for spec in file.specs]

    @property
    def tokenising(self) -> bool:
        """Whether the process for the first file is still at work on this rank."""
        process = self._queue[0].process if self._queue else None
        return process is not None and not process.poll()

    def news(self) -> list[str]:
        """Lines for people that have not been shown yet."""
        process = self._queue[0].process if self._queue else None
        if process is None:
            return []
        found, process.news = process.news, []
        return found

    def add(self, path: Path, specs: list[TaskSpec]) -> None:
        """Have the data of a task file tokenised."""
        self._queue.append(JoiningFile(path, specs))
        self._begin()

    def take(self) -> tuple[JoiningFile, DataFiles]:
        """Take the first file out, once no rank is `tokenising`. Every rank calls it.

        Returns:
            The file, and what opens its data.
        """
        file = self._queue.popleft()
        self._begin()
        results = everyones(None if file.process is None else file.process.results, self.parallel)
        # A host's ranks are neighbours, its leader the first of them.
        before = [found for found in results[: self.parallel.rank + 1] if found is not None]
        return file, replace(self.files, tokenised=before[-1])

    def cancel(self, path: Path) -> Sequence[TaskSpec]:
        """Forget a task file; returns its tasks, none if it is not there."""
        for file in self._queue:
            if file.path == path:
                if file.process is not None:
                    file.process.cancel()
                self._queue.remove(file)
                self._begin()
                return file.specs
        return ()

    def close(self) -> None:
        """Forget all of them."""
        for file in self._queue:
            if file.process is not None:
                file.process.cancel()
        self._queue.clear()

    def _begin(self) -> None:
        """Start the process of the first file."""
        if self._queue and self._queue[0].process is None and is_local_leader():
            first = self._queue[0]
            directory = Path(self.files.tokenizer.name_or_path)
            first.process = BackgroundTokenising(directory, first.data, self.files.cache)


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
