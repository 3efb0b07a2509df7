"""A task's records on disk, tokenised when they are asked for: files may be larger than memory."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_mux.data.index import DatasetIndex, Progress, build_index
from megatron_mux.data.records import BadRecordError, Instruction, PromptCompletion, Record, parse_record
from megatron_mux.data.tokenise import Example, Tokeniser
from megatron_mux.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DatasetIndex", "Example", "TaskDataset"]

# Tokens of recently used examples that stay in memory: about 9 bytes each.
_CACHED_TOKENS = 1 << 20


class TaskDataset:
    """The usable records of a JSON Lines file, by number.

    Opening it reads the file once, checking and tokenising every line (see `build_index`); after that only the places
    of the records are in memory. The file is kept open: replacing it by another one does not disturb a run.

    Args:
        path: The file.
        tokenizer: The backbone's tokenizer.
        max_length: Tokens a sequence is cut to.
        progress: Called with bytes read and bytes in all while the file is read.
        index: What another rank found in the same file, to skip reading it again.

    Raises:
        UserError: See `build_index`; or `index` does not fit the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        progress: Progress | None = None,
        index: DatasetIndex | None = None,
    ) -> None:
        self.path = Path(path)
        self._tokeniser = Tokeniser(tokenizer, max_length)
        self.index = build_index(self.path, self._tokeniser, progress) if index is None else index
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115 (kept open)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        if os.fstat(self._file.fileno()).st_size != self.index.size or max_length != self.index.max_length:
            raise self._changed()
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, Example] = OrderedDict()
        self._cached_tokens = 0

    def __len__(self) -> int:
        """Usable records."""
        return len(self.index.offsets)

    def __getitem__(self, number: int) -> Example:
        """The example of a record; treat its arrays as read-only.

        Raises:
            IndexError: There is no such record.
            UserError: The file was changed while in use.
        """
        number = self._number(number)
        with self._lock:
            if number in self._cache:
                self._cache.move_to_end(number)
                return self._cache[number]
        example = self._encode(self.record(number))
        if len(example.tokens) != self.index.lengths[number]:
            raise self._changed()
        with self._lock:
            if number not in self._cache:
                self._cache[number] = example
                self._cached_tokens += len(example.tokens)
            while self._cached_tokens > _CACHED_TOKENS:
                _, oldest = self._cache.popitem(last=False)
                self._cached_tokens -= len(oldest.tokens)
        return example

    def record(self, number: int) -> Record:
        """A record as it stands in the file.

        Raises:
            IndexError: There is no such record.
            UserError: The file was changed while in use.
        """
        offset = int(self.index.offsets[self._number(number)])
        try:
            with self._lock:
                self._file.seek(offset)
                line = self._file.readline()
            record = parse_record(line)
        except (OSError, BadRecordError) as error:
            raise self._changed() from error
        if record is None:
            raise self._changed()
        return record

    def candidates(self, number: int) -> list[tuple[Example, bool]]:
        """A record with each of the file's distinct completions in turn, and whether that one is its own.

        In the order of `distinct_completions`; meaningful only where that is not None.
        """
        record = self.record(number)
        if self.distinct_completions is None or not isinstance(record, (PromptCompletion, Instruction)):
            raise ValueError(f"{self.path} has no small set of completions to choose among")
        own = _completion(record)
        return [(self._encode(_answered(record, text)), text == own) for text in self.distinct_completions]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """`[n]` tokens of each record."""
        return self.index.lengths

    @property
    def label_counts(self) -> npt.NDArray[np.int32]:
        """`[n]` labelled tokens of each record, never zero."""
        return self.index.label_counts

    @property
    def dropped(self) -> int:
        """Records left out since nothing of them is to be learned within `max_length`."""
        return self.index.dropped

    @property
    def distinct_completions(self) -> list[str] | None:
        """The completions that occur, when every record has one and they are at most 16; else None."""
        return self.index.distinct_completions

    @property
    def end_of_sequence(self) -> int:
        """The token that is appended to sequences."""
        return self._tokeniser.end_of_sequence

    @property
    def fingerprint(self) -> str:
        """Identifies the file's content."""
        return self.index.fingerprint

    def close(self) -> None:
        """Close the file; the data set is of no use afterwards."""
        self._file.close()

    def _number(self, number: int) -> int:
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} usable records, no number {number}")
        return number % len(self)

    def _encode(self, record: Record) -> Example:
        try:
            return self._tokeniser.encode(record)
        except BadRecordError as error:
            raise self._changed() from error

    def _changed(self) -> UserError:
        return UserError(
            f"{self.path}: was changed while in use: leave data files alone while tasks learn from them"
        )


def _completion(record: PromptCompletion | Instruction) -> str:
    return record.completion if isinstance(record, PromptCompletion) else record.output


def _answered(record: PromptCompletion | Instruction, text: str) -> Record:
    if isinstance(record, PromptCompletion):
        return PromptCompletion(record.prompt, text)
    return Instruction(record.instruction, record.input, text)
