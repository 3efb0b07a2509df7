"""The tokens of one source, and its records as they stand in the files: opened once for all tasks of a process."""

from __future__ import annotations

import os
import threading
from weakref import WeakValueDictionary, finalize

import numpy as np

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.records import Record
from megatron_mux.data.section import DataSource
from megatron_mux.data.sources.selection import FILE_BITS, Selection
from megatron_mux.data.sources.source import stamp_of
from megatron_mux.data.tokenise import Example, Tokeniser
from megatron_mux.data.tokenised_file import TokenisedFile, opened_entry
from megatron_mux.errors import UserError

_opened: WeakValueDictionary[tuple[str, TokenisedFile], RecordFile] = WeakValueDictionary()
_opening = threading.Lock()


def opened_source(source: DataSource, tokenised: TokenisedFile) -> RecordFile:
    """The one reader of a source in this process, for as long as anything holds it.

    Args:
        source: What a task file says.
        tokenised: Where its tokens are.

    Raises:
        UserError: The files cannot be read, or are not those that were tokenised.
    """
    with _opening:
        # By the files that the paths name now: those of a reader that is open may have been replaced since.
        selection = Selection(source)
        key = source.model_dump_json(), tokenised
        known = _opened.get(key)
        if known is None and selection.stamps == tokenised.stamps:
            known = _opened[key] = RecordFile(selection, tokenised)
            return known
        selection.close()
        if known is None or selection.stamps != tokenised.stamps:
            raise changed(selection.label)
        return known


class RecordFile:
    """A tokenised source, its files kept open: replacing them by others does not disturb a run.

    The files are closed once nobody holds this any more.

    Args:
        selection: Its files.
        tokenised: Where its tokens are.

    Attributes:
        entry: The tokens.

    Raises:
        UserError: The tokens are there no longer.
    """

    def __init__(self, selection: Selection, tokenised: TokenisedFile) -> None:
        self.label = selection.label
        self._selection = selection
        finalize(self, selection.close)
        self.entry = opened_entry(tokenised, self.label)
        self._files = [(file.file.fileno(), file.stamp) for file in selection.files]
        self._lock = threading.Lock()

    def example(self, row: int, tokeniser: Tokeniser) -> Example:
        """A record's example, without its completion's text.

        Args:
            row: Of the entry.
            tokeniser: Says where it is cut.

        Raises:
            UserError: Its file was changed while in use.
        """
        tokens, labelled = self.entry.read(row, tokeniser.max_length, tokeniser.truncation_side)
        descriptor, stamp = self._files[self.entry.place(row) >> FILE_BITS]
        if stamp_of(os.fstat(descriptor)) != stamp:
            again = self.encode(self.record(row), tokeniser)
            if not np.array_equal(again.tokens, tokens):
                raise changed(self.label)
        return Example(tokens, labelled, None)

    def record(self, row: int) -> Record:
        """A record as it stands in its file.

        Raises:
            UserError: The file was changed while in use.
        """
        try:
            with self._lock:
                return self._selection.record(self.entry.place(row))
        except (OSError, BadRecordError) as error:
            raise changed(self.label) from error

    def encode(self, record: Record, tokeniser: Tokeniser) -> Example:
        """Tokenise a record again.

        Raises:
            UserError: It cannot be: the file was changed while in use.
        """
        try:
            return tokeniser.encode(record)
        except BadRecordError as error:
            raise changed(self.label) from error


def changed(label: str) -> UserError:
    """The error for files that no longer hold what was tokenised."""
    return UserError(f"{label}: was changed while in use: leave data files alone while tasks learn from them")
