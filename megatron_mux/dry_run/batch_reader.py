"""Finds the heaviest batch of each task: from its data if they can be read, else an upper bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mux.dry_run.heaviest_batch import PASS, Batch, densest, heaviest, longest
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec

if TYPE_CHECKING:
    from megatron_mux.data.dataset import TaskDataset

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class BatchReader:
    """Reads task data and picks the heaviest batches.

    Args:
        backbone: Directory of config.json and, to read data, of the tokenizer.

    Attributes:
        unread: Tasks whose data could not be read.
    """

    def __init__(self, backbone: Path) -> None:
        self.unread: list[str] = []
        self._backbone = backbone
        self._tokenizer: Any = None

    def of(self, specs: Sequence[TaskSpec]) -> list[tuple[Batch, Batch | None]]:
        """Return each task's step batch, and its evaluation pass if it is evaluated.

        Raises:
            UserError: Lists all problems of the data.
        """
        found: list[tuple[Batch, Batch | None]] = []
        problems: list[str] = []
        for spec in specs:
            try:
                found.append((self._step(spec), self._evaluation(spec)))
            except UserError as error:
                problems += [f"task {spec.name!r}: {problem}" for problem in error.problems]
        if problems:
            raise UserError(*problems)
        return found

    def _step(self, spec: TaskSpec) -> Batch:
        return self._of(spec, spec.data.path, lambda data: heaviest(spec, data)) or longest(spec)

    def _evaluation(self, spec: TaskSpec) -> Batch | None:
        if spec.eval is None:
            return None
        found = self._of(spec, spec.eval.path, densest)
        return found or longest(spec, -(-PASS // spec.data.max_length))

    def _of(self, spec: TaskSpec, file: str | Path, choose: Callable[[TaskDataset], Batch]) -> Batch | None:
        """The batch chosen from a file's records; None if they cannot be read."""
        path = Path(file)
        files = [self._backbone / name for name in _TOKENIZER if (self._backbone / name).is_file()]
        if not (files and path.is_file()):
            self.unread += [spec.name] * (spec.name not in self.unread)
            return None
        return self._read(path, spec.data.max_length, choose)

    def _read(self, path: Path, max_length: int, choose: Callable[[TaskDataset], Batch]) -> Batch:
        # What comes here takes seconds to import.
        from megatron_mux.data.dataset import TaskDataset
        from megatron_mux.data.tokenizer import load_tokenizer

        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._backbone)
        data = TaskDataset(path, self._tokenizer, max_length)
        try:
            return choose(data)
        finally:
            data.close()
