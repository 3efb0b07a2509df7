"""Task files that appear in the watched directory join the run once they are prepared; removed ones leave.

Prepared: their data are tokenised, and what memory they take is predicted. The others train meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_mux.data.background import BackgroundTokenising, Results
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenised_file import Reading, cached_tokens
from megatron_mux.engine.agreement import everyones
from megatron_mux.errors import UserError
from megatron_mux.launcher import is_local_leader
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec, read_task_file
from megatron_mux.training.commands import Cancel, Command, Drain, Submit

STOP = "STOP"
_SUFFIXES = (".yaml", ".yml")


@dataclass
class JoiningFile:
    """A task file that is being prepared.

    Attributes:
        path: The task file.
        specs: Its tasks.
        continues: See `Submit`.
        process: Tokenises their data; None while it has not begun, and on ranks that leave it to their host's leader.
        predicting: Predicts their memory; None as well where another rank does, or nobody need.
        cached: What is read for them, if all of it was in the cache; None like `process`.
        begun: Whether its turn has come.
    """

    path: Path
    specs: list[TaskSpec]
    continues: Path | None = None
    process: BackgroundTokenising | None = None
    predicting: Future[None] | None = None
    cached: Results | None = None
    begun: bool = False

    @property
    def results(self) -> Results | None:
        """The tokens of its data, on the rank that found them."""
        return self.cached if self.process is None else self.process.results

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
        queue: The files.
    """

    files: DataFiles
    parallel: Parallel
    predict: Callable[[Sequence[TaskSpec]], Future[None] | None] = lambda specs: None
    queue: deque[JoiningFile] = field(default_factory=deque)

    @property
    def names(self) -> list[str]:
        """The tasks of all files."""
        return [spec.name for file in self.queue for spec in file.specs]

    @property
    def preparing(self) -> bool:
        """Whether this rank is still at work for the first file."""
        if not self.queue:
            return False
        process, predicting = self.queue[0].process, self.queue[0].predicting
        tokenised = process is None or process.poll()
        return not tokenised or (predicting is not None and not predicting.done())

    def log_lines(self) -> list[str]:
        """Lines for people that have not been shown yet."""
        process = self.queue[0].process if self.queue else None
        if process is None:
            return []
        found, process.log_lines = process.log_lines, []
        return found

    def add(self, path: Path, specs: list[TaskSpec], continues: Path | None = None) -> None:
        """Have a task file prepared."""
        self.queue.append(JoiningFile(path, specs, continues))
        self._begin()

    def take(self) -> tuple[JoiningFile, DataFiles]:
        """Take the first file out, once no rank is `preparing`. Every rank calls it.

        Returns:
            The file, and what opens its data.
        """
        file = self.queue.popleft()
        self._begin()
        results = everyones(file.results, self.parallel)
        # A host's ranks are neighbours, its leader the first of them.
        before = [found for found in results[: self.parallel.rank + 1] if found is not None]
        return file, replace(self.files, tokenised=before[-1])

    def cancel(self, path: Path) -> Sequence[TaskSpec]:
        """Forget a task file; returns its tasks, none if it is not there."""
        for file in self.queue:
            if file.path == path:
                if file.process is not None:
                    file.process.cancel()
                self.queue.remove(file)
                self._begin()
                return file.specs
        return ()

    def drop(self, name: str) -> None:
        """Forget one task, and its file if that has no other."""
        for file in [file for file in self.queue if name in [spec.name for spec in file.specs]]:
            file.specs = [spec for spec in file.specs if spec.name != name]
            if not file.specs:
                self.cancel(file.path)

    def close(self) -> None:
        """Forget all of them."""
        for file in self.queue:
            if file.process is not None:
                file.process.cancel()
        self.queue.clear()

    def _begin(self) -> None:
        """Begin to prepare the first file."""
        if not self.queue or self.queue[0].begun:
            return
        first = self.queue[0]
        first.begun, first.predicting = True, self.predict(first.specs)
        if is_local_leader():
            tokenizer, cache = self.files.tokenizer, self.files.cache
            found = {own.key: cached_tokens(own.source, tokenizer, cache, own.loss) for own in first.data}
            first.cached = {key: tokens for key, tokens in found.items() if tokens is not None}
            if len(first.cached) < len(found):
                first.process = BackgroundTokenising(Path(tokenizer.name_or_path), first.data, cache)


def read_joining(path: Path) -> list[TaskSpec]:
    """Read a task file whose tasks are to join a run.

    Raises:
        UserError: It is wrong, or asks for what only the file that a run begins with can ask for.
    """
    file = read_task_file(path, data_later=True)
    if file.scheduler is not None or any(sweep.sampler is not None for sweep in file.sweeps.values()):
        raise UserError("a scheduler or sampler belongs to the file that a run begins with (--mux-tasks)")
    return file.tasks


@dataclass
class WatchedDirectory:
    """A source of commands: files that come and go in a directory.

    A task file that is new, or changed since it was refused, is submitted; one that is gone is cancelled. As long as a
    file named `STOP` is there, the run is to end once its tasks are done.

    Attributes:
        directory: Where task files appear; files whose name starts with a dot are left alone, so that a writer can
            write there and rename.
    """

    directory: Path
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @property
    def awaited(self) -> str:
        """See `CommandSource`."""
        return f"task files in {self.directory} (a file {STOP} ends the run)"

    def poll(self) -> Sequence[Command]:
        """Compare the directory with what it held the last time."""
        now, stop = self._read()
        added = sorted(path for path, stamp in now.items() if self._seen.get(path) != stamp)
        removed = sorted(path for path in self._seen if path not in now)
        self._seen = now
        return [*map(Cancel, removed), *map(Submit, added), *[Drain()] * stop]

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
