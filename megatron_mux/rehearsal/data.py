"""The heaviest batches of tasks: of their data where these are at hand, else the heaviest that may be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_mux.errors import UserError
from megatron_mux.memory.store import Store
from megatron_mux.rehearsal.casting import Batch, heaviest, longest
from megatron_mux.tasks import TaskSpec

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Batches:
    """The heaviest batches of a file's tasks.

    Args:
        backbone: The directory of config.json; with the tokenizer in it, data can be read.
        store: What is known of data that have been read.

    Attributes:
        unread: Tasks whose data are not at hand.
    """

    def __init__(self, backbone: Path, store: Store) -> None:
        self.unread: list[str] = []
        self._backbone = backbone
        self._store = store
        self._tokenizer: Any = None

    def of(self, specs: Sequence[TaskSpec]) -> list[Batch]:
        """A batch for each task.

        Raises:
            UserError: With all that is wrong with the data.
        """
        found, problems = [], []
        for spec in specs:
            try:
                found.append(self._of(spec))
            except UserError as error:
                problems += [f"task {spec.name!r}: {problem}" for problem in error.problems]
        if problems:
            raise UserError(*problems)
        return found

    def _of(self, spec: TaskSpec) -> Batch:
        data = Path(spec.data.path)
        files = [self._backbone / name for name in _TOKENIZER if (self._backbone / name).is_file()]
        if not (files and data.is_file()):
            self.unread.append(spec.name)
            return longest(spec)
        about = {
            "files": [_identity(file) for file in (data, *files)],
            "max_length": spec.data.max_length,
            "shuffle": spec.data.shuffle,
            "training": spec.training.model_dump(mode="json"),
        }
        text = self._store.read(about)
        if text is not None:
            known = json.loads(text)
            return Batch(tuple(known["lengths"]), tuple(known["labels"]))
        batch = self._read(spec)
        self._store.write(about, json.dumps(asdict(batch)))
        return batch

    def _read(self, spec: TaskSpec) -> Batch:
        # What comes here takes seconds to import.
        from megatron_mux.data.dataset import TaskDataset
        from megatron_mux.data.tokenizer import load_tokenizer

        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._backbone)
        data = TaskDataset(spec.data.path, self._tokenizer, spec.data.max_length)
        try:
            return heaviest(spec, data)
        finally:
            data.close()


def _identity(file: Path) -> tuple[str, int, int]:
    """A file as it is now."""
    status = file.stat()
    return str(file.resolve()), status.st_size, status.st_mtime_ns
