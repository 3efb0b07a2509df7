"""A task's records: their tokens come from the token cache, and may be larger than memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import numpy as np

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.cut import Cut
from megatron_mux.data.messages import Messages
from megatron_mux.data.mixture import Mixing
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.data.records import PromptCompletion, record_of
from megatron_mux.data.section import DataSource
from megatron_mux.data.token_cache import MAX_DISTINCT, TokenCacheEntry, digest
from megatron_mux.data.tokenise import Example, Tokeniser, kept_part
from megatron_mux.data.tokenised_file import (
    Progress,
    Reading,
    TokenisedFile,
    as_source,
    check_tokens,
    opened_entry,
    progress_lines,
    row_of,
    tokenise_file,
)
from megatron_mux.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MAX_DISTINCT", "DataFiles", "Example", "TaskDataset"]


class TaskDataset:
    """The usable records of a source, or of several that are mixed, by number: those with a label after the cut.

    A source is tokenised when it is first opened (see `tokenise_file`). Its tokens are then mapped into memory, once
    for all data sets of this process; its files are not read again.

    Args:
        source: The path of a file, or a source, or the sources of a mixture.
        tokenizer: The backbone's tokenizer.
        max_length: Tokens a sequence is cut to.
        progress: Told how far tokenising is.
        tokenised: What another process of this host made of the sources; by default they are tokenised here.
        cache: See `token_cache_directory`.
        truncation_side: Where sequences are cut, "right" or "left".
        mixing: How several sources are mixed; a record may then have several numbers.

    Attributes:
        path: Names the sources in messages.
        lengths: `[n]` int32, tokens of each record.
        label_counts: `[n]` int32, labels of each record, never zero.
        cut: What was lost by the cut.
        dropped: Records left out because they have no label after it.

    Raises:
        UserError: See `tokenise_file`; or no record is usable.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | DataSource | Sequence[DataSource],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        progress: Progress | None = None,
        tokenised: TokenisedFile | Sequence[TokenisedFile] | None = None,
        cache: str | Path | None = None,
        truncation_side: str = "right",
        mixing: Mixing | None = None,
    ) -> None:
        given = [source] if isinstance(source, (str, os.PathLike, DataSource)) else source
        sources = [as_source(one) for one in given]
        self.path = " + ".join(one.label for one in sources)
        self.max_length = max_length
        self._tokeniser = Tokeniser(tokenizer, max_length, truncation_side)
        if tokenised is None:
            tokenised = [tokenise_file(one, tokenizer, cache, progress) for one in sources]
        self.tokenised = (tokenised,) if isinstance(tokenised, TokenisedFile) else tuple(tokenised)
        self._sources = sources
        pairs = list(zip(sources, self.tokenised, strict=True))
        self._entries = [opened_entry(made, one.label) for one, made in pairs]
        usable = [entry.usable(max_length, truncation_side) for entry in self._entries]
        self._usable = usable  # equal cuts of a source share their arrays as long as someone holds them
        self.cut = sum((own.cut for own in usable), Cut())
        self.dropped = self.cut.empty + self.cut.emptied
        found = zip(sources, self._entries, usable, strict=True)
        if empty := [
            _nothing_to_learn(one, entry, own.cut.emptied, max_length)
            for one, entry, own in found
            if not len(own.numbers)
        ]:
            raise UserError(*empty)
        columns = zip(*((own.numbers, own.lengths, own.label_counts) for own in usable), strict=True)
        # Those of one source are shared with its other data sets.
        numbers, lengths, labels = (own[0] if len(own) == 1 else np.concatenate(own) for own in columns)
        sizes = [len(own.numbers) for own in usable]
        owners = np.broadcast_to(np.int16(0), numbers.shape)
        if len(usable) > 1:
            owners = np.repeat(np.arange(len(usable), dtype=np.int16), sizes)
        self._mixed = None
        if mixing is not None:
            order = mixing.order(sizes)
            numbers, lengths, labels, owners = numbers[order], lengths[order], labels[order], owners[order]
            self._mixed = hashlib.sha256(order.tobytes()).hexdigest()
        self._numbers, self._owners, self.lengths, self.label_counts = numbers, owners, lengths, labels

    def check_tokens(self, rows: int) -> None:
        """Refuse tokens that a backbone's embedding of `rows` rows lacks.

        Raises:
            UserError: Names the first one of each source by file and row.
        """
        problems: list[str] = []
        for source, entry in zip(self._sources, self._entries, strict=True):
            try:
                check_tokens(entry, source, self.tokenizer, rows)
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(*problems)

    def __len__(self) -> int:
        """Usable records."""
        return len(self._numbers)

    def __getitem__(self, number: int) -> Example:
        """The example of a record, without its completion's text.

        Raises:
            IndexError: There is no such record.
        """
        entry, row = self._find(number)
        return Example(*entry.read(row, self.max_length, self._tokeniser.truncation_side), None)

    def uncut(self, number: int) -> tuple[Example, slice]:
        """The example of a record uncut, and which part of it is left after the cut.

        Raises:
            IndexError: There is no such record.
        """
        entry, row = self._find(number)
        whole = Example(*entry.read(row, None), None, entry.is_unprompted(row))
        return whole, kept_part(len(whole.tokens), self.max_length, self._tokeniser.truncation_side)

    def candidates(self, number: int) -> tuple[list[Example], int]:
        """A record with each of the `distinct_completions` in turn, and which of them is its own.

        The record alone, where there are none to choose among.
        """
        texts = self.distinct_completions
        if texts is None:
            return [self[number]], 0
        entry, row = self._find(number)
        tokens, tails = entry.read(row, None)[0].tolist(), self._completion_tokens
        own = [digest(text) for text in texts].index(int(entry.completions(np.array([row]))[0]))
        head = tokens[: len(tokens) - len(tails[own])]
        pairs = zip(texts, tails, strict=True)
        return [self._tokeniser.joined(head, tail, PromptCompletion("", text)) for text, tail in pairs], own

    @cached_property
    def distinct_completions(self) -> list[str] | None:
        """The completions that occur, in order of appearance, if every record has one and at most 128 differ."""
        digests = np.empty(len(self), np.uint64)
        for owner, entry in enumerate(self._entries):
            own = self._owners == owner
            digests[own] = entry.completions(self._numbers[own])
        if not digests.all():
            return None
        _, first = np.unique(digests, return_index=True)
        if len(first) > MAX_DISTINCT:
            return None
        texts = {key: text for entry in self._entries for key, text in entry.completion_texts.items()}
        chosen = [int(own) for own in digests[np.sort(first)]]
        return [texts[own] for own in chosen] if texts.keys() >= set(chosen) else None

    @cached_property
    def _completion_tokens(self) -> list[list[int]]:
        """Tokens of each of the `distinct_completions`."""
        return [self._tokeniser.closed(own) for own in self._tokeniser.plain(self.distinct_completions or [])]

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
        """Identifies the records and their order: what the files hold, and how they are mixed."""
        prints = [entry.fingerprint for entry in self._entries]
        if self._mixed is None:
            return prints[0]
        return hashlib.sha256(json.dumps([prints, self._mixed]).encode()).hexdigest()

    def close(self) -> None:
        """Let go of the tokens, which stay mapped for others that read them; the data set is of no use afterwards."""
        self._entries.clear()

    def _find(self, number: int) -> tuple[TokenCacheEntry, int]:
        """The cache entry of a record's source, and its number there."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} usable records, no number {number}")
        return self._entries[self._owners[number]], int(self._numbers[number])


def _nothing_to_learn(source: DataSource, entry: TokenCacheEntry, emptied: int, max_length: int) -> str:
    """The problem with a source of which no record is usable."""
    none = f"{source.label}: none of its {entry.records} records has a token to learn"
    if emptied:
        return f"{none} within data.max_length {max_length}: raise it, or give the records something to learn"
    row, roles = row_of(source, entry, 0), ""
    with suppress(BadRecordError):
        if row is not None and isinstance(record := record_of(row.value), Messages):
            found = dict.fromkeys(message["role"] for message in record.messages)
            roles = f' (of messages those of "assistant" are learned, and the first record has {", ".join(found)})'
    return f"{none}{roles}: give them something to learn"


_preferences: WeakValueDictionary[tuple[str, str, int], PreferenceDataset] = WeakValueDictionary()
"""Those that tasks hold, by source, tokens and cut: equal ones are one."""


@dataclass(frozen=True)
class DataFiles:
    """Opens the data files of tasks.

    Attributes:
        tokenizer: The backbone's.
        say: Shows a line for people: how far tokenising a long file is.
        cache: See `token_cache_directory`.
        tokenised: What is known of sources already, by `Reading.key`: their tokens, or what is wrong with them.
    """

    tokenizer: Any
    say: Callable[[str], None]
    cache: str | Path | None = None
    tokenised: Mapping[str, TokenisedFile | UserError] = field(default_factory=dict)

    def open(
        self,
        source: str | os.PathLike[str] | DataSource | Sequence[DataSource],
        max_length: int,
        truncation_side: str = "right",
        mixing: Mixing | None = None,
        loss: str = "sft",
    ) -> TaskDataset:
        """Open files, tokenising them if need be; see `TaskDataset`.

        Args:
            source: The path of a file, or a source, or the sources of a mixture.
            max_length: Tokens a sequence is cut to.
            truncation_side: Where sequences are cut.
            mixing: How several sources are mixed.
            loss: Of the task: one of a preference has records of its own kind (`PreferenceDataset`), in one source.

        Raises:
            UserError: With the problems of all sources.
        """
        given = [source] if isinstance(source, (str, os.PathLike, DataSource)) else source
        sources = [as_source(one) for one in given]
        if loss != "sft":
            (only,) = sources
            tokens = self._tokenised(only, loss)
            key = only.model_dump_json(), tokens.entry, max_length
            data = _preferences.get(key)
            if data is None:
                data = PreferenceDataset(only, self.tokenizer, max_length, loss, self.cache, tokens)
                _preferences[key] = data
            return cast(TaskDataset, data)
        made: list[TokenisedFile] = []
        problems: list[str] = []
        for one in sources:
            try:
                made.append(self._tokenised(one))
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(*dict.fromkeys(problems))
        return TaskDataset(
            sources, self.tokenizer, max_length, None, made, self.cache, truncation_side, mixing
        )

    def _tokenised(self, source: DataSource, loss: str = "sft") -> TokenisedFile:
        known = self.tokenised.get(Reading(source, loss).key)
        if isinstance(known, UserError):
            raise known
        progress = progress_lines(source.label, self.say)
        return known or tokenise_file(source, self.tokenizer, self.cache, progress, loss)
