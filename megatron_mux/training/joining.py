"""Task files that appear in the watched directory join the run once they are prepared; removed ones leave.

Prepared: their data are tokenised, and what memory they take is predicted. The others train meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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
    """A task file that is being prepared.

    Attributes:
        path: The task file.
        specs: Its tasks.
        process: Tokenises their data; None while it has not begun, and on ranks that leave it to their host's leader.
        predicting: Predicts their memory; None as well where another rank does, or nobody need.
        begun: Whether its turn has come.
    """

    path: Path
    specs: list[TaskSpec]
    process: BackgroundTokenising | None = None
    predicting: Future[None] | None = None
    begun: bool = False

    @property
    def data(self) -> list[Reading]:
        """What is read for the tasks: training data, then held-out data."""
        training = [Reading(own, spec.training.loss) for spec in self.specs for own in spec.data.sources]
        held_out = [Reading(spec.eval.source, spec.training.loss) for spec in self.specs if spec.eval]
        return training + held_out


@dataclass
class JoiningFiles:
    """Task files in the order in which they appeared; the first is being prepared, its data by one rank a host.

    All ranks have the same files.

    Attributes:
        files: Opens data.
        parallel: Where this rank stands.
        predict: Begins to predict the memory of tasks; every rank calls it.
    """

    files: DataFiles
    parallel: Parallel
    predict: Callable[[Sequence[TaskSpec]], Future[None] | None] = lambda specs: None
    _queue: deque[JoiningFile] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def names(self) -> list[str]:
        """The tasks of all files."""
        return [spec.name for file in self._queue for spec in file.specs]

    @property
    def preparing(self) -> bool:
        """Whether this rank is still at work for the first file."""
        if not self._queue:
            return False
        process, predicting = self._queue[0].process, self._queue[0].predicting
        tokenised = process is None or process.poll()
        return not tokenised or (predicting is not None and not predicting.done())

    def news(self) -> list[str]:
        """Lines for people that have not been shown yet."""
        process = self._queue[0].process if self._queue else None
        if process is None:
            return []
        found, process.news = process.news, []
        return found

    def add(self, path: Path, specs: list[TaskSpec]) -> None:
        """Have a task file prepared."""
        self._queue.append(JoiningFile(path, specs))
        self._begin()

    def take(self) -> tuple[JoiningFile, DataFiles]:
        """Take the first file out, once no rank is `preparing`. Every rank calls it.

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
        """Begin to prepare the first file."""
        if not self._queue or self._queue[0].begun:
            return
        first = self._queue[0]
        first.begun, first.predicting = True, self.predict(first.specs)
        if is_local_leader():
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
