"""The tokens of one source, and its records as they stand in the files."""

from __future__ import annotations

import os
import threading

import numpy as np

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.records import Record
from megatron_mux.data.section import DataSource
from megatron_mux.data.sources.selection import FILE_BITS, Selection
from megatron_mux.data.sources.source import stamp_of
from megatron_mux.data.tokenise import Example, Tokeniser, kept_part
from megatron_mux.data.tokenised_file import TokenisedFile, check_tokens, opened_entry
from megatron_mux.errors import UserError


class RecordFile:
    """A tokenised source, its files kept open: replacing them by others does not disturb a run.

    Args:
        source: What a task file says.
        tokenised: Where its tokens are.
        tokeniser: Made those, cut as they are read.

    Attributes:
        entry: The tokens.

    Raises:
        UserError: The files cannot be read, or are not those that were tokenised.
    """

    def __init__(self, source: DataSource, tokenised: TokenisedFile, tokeniser: Tokeniser) -> None:
        self.label = source.label
        self._source = source
        self._tokeniser = tokeniser
        self.entry = opened_entry(tokenised, self.label)
        self._selection = Selection(source)
        if self._selection.stamps != tokenised.stamps:
            self.close()
            raise self.changed()
        self._opened = [(file.file.fileno(), file.stamp) for file in self._selection.files]
        self._lock = threading.Lock()

    def example(self, row: int) -> Example:
        """A record's example, without its completion's text.

        Raises:
            UserError: Its file was changed while in use.
        """
        limit, side = self._tokeniser.max_length, self._tokeniser.truncation_side
        assert limit is not None
        tokens, labelled = self.entry.read(row, limit, side)
        descriptor, stamp = self._opened[self.entry.place(row) >> FILE_BITS]
        if stamp_of(os.fstat(descriptor)) != stamp:
            again = self.encode(self.record(row))
            if not np.array_equal(again.tokens, tokens):
                raise self.changed()
        return Example(tokens, labelled, None)

    def uncut(self, row: int) -> tuple[Example, slice]:
        """A record's example uncut, and the part of it that `example` gives.

        Raises:
            UserError: Its file was changed while in use.
        """
        self.example(row)  # refuses a file that was changed
        whole = Example(*self.entry.read(row, None), None)
        limit, side = self._tokeniser.max_length, self._tokeniser.truncation_side
        return whole, kept_part(len(whole.tokens), limit, side)

    def record(self, row: int) -> Record:
        """A record as it stands in its file.

        Raises:
            UserError: The file was changed while in use.
        """
        try:
            with self._lock:
                return self._selection.record(self.entry.place(row))
        except (OSError, BadRecordError) as error:
            raise self.changed() from error

    def encode(self, record: Record) -> Example:
        """Tokenise a record again.

        Raises:
            UserError: It cannot be: the file was changed while in use.
        """
        try:
            return self._tokeniser.encode(record)
        except BadRecordError as error:
            raise self.changed() from error

    def check_tokens(self, rows: int) -> None:
        """See the function of that name."""
        check_tokens(self.entry, self._source, self._tokeniser.tokenizer, rows)

    def close(self) -> None:
        """Close the files."""
        self._selection.close()

    def changed(self) -> UserError:
        """The error for files that no longer hold what was tokenised."""
        return UserError(
            f"{self.label}: was changed while in use: leave data files alone while tasks learn from them"
        )
