"""A task's records: tokens from the token cache, text from the file itself; both may be larger than memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.data.records import BadRecordError, PromptCompletion, Record, parse_record
from megatron_mux.data.token_cache import TokenCacheEntry
from megatron_mux.data.tokenise import Example, Tokeniser
from megatron_mux.data.tokenised_file import Progress, TokenisedFile, progress_lines, tokenise_file
from megatron_mux.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Example", "TaskDataset"]

MAX_DISTINCT = 128
"""Records can be classified among at most this many distinct completions: each is scored with every prompt."""


class TaskDataset:
    """The usable records of a JSON Lines file, by number: those with a label within the maximum length.

    The file is tokenised when it is first opened (see `tokenise_file`); its tokens are then mapped into memory. The
    file is kept open: replacing it by another one does not disturb a run.

    Args:
        path: The file.
        tokenizer: The backbone's tokenizer.
        max_length: Tokens a sequence is cut to.
        progress: Told how far tokenising is.
        tokenised: What another process of this host made of the file; by default it is tokenised here, if need be.
        cache: See `token_cache_directory`.

    Attributes:
        lengths: `[n]` int32, tokens of each record.
        label_counts: `[n]` int32, labels of each record, never zero.
        dropped: Records left out because they have no label within `max_length`.

    Raises:
        UserError: See `tokenise_file`; or no record is usable; or the file is not the one that was tokenised.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        progress: Progress | None = None,
        tokenised: TokenisedFile | None = None,
        cache: Path | None = None,
    ) -> None:
        self.path = Path(path)
        self.max_length = max_length
        self._tokeniser = Tokeniser(tokenizer, max_length)
        self.tokenised = tokenised or tokenise_file(self.path, tokenizer, cache, progress)
        try:
            self._entry = TokenCacheEntry(Path(self.tokenised.entry))
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{self.path}: its tokens were taken from the cache ({self.tokenised.entry}): begin again"
            ) from error
        self._numbers, self.lengths, self.label_counts = self._entry.usable(max_length)
        self.dropped = self._entry.records - len(self)
        if not len(self):
            raise UserError(
                f"{self.path}: none of its {self.dropped} records has a token to learn within data.max_length "
                f"{max_length}: raise it, or give the records something to learn"
            )
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115 (kept open)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        if not self.tokenised.is_of(self._file):
            self._file.close()
            raise self._changed()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Usable records."""
        return len(self._numbers)

    def __getitem__(self, number: int) -> Example:
        """The example of a record, without its completion's text.

        Raises:
            IndexError: There is no such record.
            UserError: The file was changed while in use.
        """
        tokens, labelled = self._entry.read(self._row(number), self.max_length)
        if not self.tokenised.is_of(self._file):
            again = self._encode(self.record(number))
            if not np.array_equal(again.tokens, tokens):
                raise self._changed()
        return Example(tokens, labelled, None)

    def record(self, number: int) -> Record:
        """A record as it stands in the file.

        Raises:
            IndexError: There is no such record.
            UserError: The file was changed while in use.
        """
        offset = self._entry.line(self._row(number))
        try:
            # A reader of its own: another one's buffer may hold what the file held before.
            with self._lock, open(self._file.fileno(), "rb", closefd=False) as file:
                file.seek(offset)
                line = file.readline()
            record = parse_record(line)
        except (OSError, BadRecordError) as error:
            raise self._changed() from error
        if record is None:
            raise self._changed()
        return record

    def candidates(self, number: int) -> tuple[list[Example], int]:
        """A record with each of the `distinct_completions` in turn, and which of them is its own.

        The record alone, where there are none to choose among.
        """
        if self.distinct_completions is None:
            return [self[number]], 0
        record = self.record(number)
        if not isinstance(record, PromptCompletion) or record.completion not in self.distinct_completions:
            raise self._changed()
        examples = [self._encode(replace(record, completion=text)) for text in self.distinct_completions]
        return examples, self.distinct_completions.index(record.completion)

    @cached_property
    def distinct_completions(self) -> list[str] | None:
        """The completions that occur, in order of appearance, if every record has one and at most 128 differ."""
        digests = self._entry.completions(self._numbers)
        if not digests.all():
            return None
        _, first = np.unique(digests, return_index=True)
        if len(first) > MAX_DISTINCT:
            return None
        records = [self.record(int(number)) for number in np.sort(first)]
        return [record.completion for record in records if isinstance(record, PromptCompletion)]

    @property
    def tokenizer(self) -> Any:
        """The backbone's tokenizer."""
        return self._tokeniser.tokenizer

    @property
    def end_of_sequence(self) -> int:
        """The token that is appended to sequences."""
        return self._tokeniser.end_of_sequence

    @property
    def fingerprint(self) -> str:
        """Identifies the file's content."""
        return self._entry.fingerprint

    def close(self) -> None:
        """Close the file; the data set is of no use afterwards."""
        self._file.close()

    def _row(self, number: int) -> int:
        """A record's row in the cache entry."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} usable records, no number {number}")
        return int(self._numbers[number])

    def _encode(self, record: Record) -> Example:
        try:
            return self._tokeniser.encode(record)
        except BadRecordError as error:
            raise self._changed() from error

    def _changed(self) -> UserError:
        return UserError(
            f"{self.path}: was changed while in use: leave data files alone while tasks learn from them"
        )


@dataclass(frozen=True)
class DataFiles:
    """Opens the data files of tasks.

    Attributes:
        tokenizer: The backbone's.
        say: Shows a line for people: how far tokenising a long file is.
        cache: See `token_cache_directory`.
        tokenised: What is known of files already: their tokens, or what is wrong with them.
    """

    tokenizer: Any
    say: Callable[[str], None]
    cache: Path | None = None
    tokenised: Mapping[str, TokenisedFile | UserError] = field(default_factory=dict)

    def open(self, path: str | os.PathLike[str], max_length: int, loss: str = "sft") -> TaskDataset:
        """Open a file, tokenising it if need be.

        Args:
            path: The file.
            max_length: Tokens a sequence is cut to.
            loss: Of the task: one of a preference has records of its own kind (`PreferenceDataset`).

        Raises:
            UserError: See `TaskDataset`.
        """
        if loss != "sft":
            return cast(TaskDataset, PreferenceDataset(path, self.tokenizer, max_length, loss, self.cache))
        known = self.tokenised.get(str(path))
        if isinstance(known, UserError):
            raise known
        progress = progress_lines(Path(path), self.say)
        return TaskDataset(path, self.tokenizer, max_length, progress, known, self.cache)
