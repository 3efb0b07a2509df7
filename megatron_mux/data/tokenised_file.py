"""One pass over data files: every record to tokens in the cache, or everything that is wrong with the files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_mux.data.bad_record import BadRecordError, UnusableRecordError
from megatron_mux.data.digests import file_digest
from megatron_mux.data.row_reader import RowReader, reader_of
from megatron_mux.data.section import DataSource
from megatron_mux.data.sources.selection import Selection
from megatron_mux.data.sources.source import Row
from megatron_mux.data.token_cache import (
    TokenCacheEntry,
    TokenCacheWriter,
    locked,
    open_entry,
    token_cache_directory,
)
from megatron_mux.data.tokenise import Example
from megatron_mux.data.tokenizer import tokenizer_fingerprint
from megatron_mux.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int, int], None]
"""Called now and then with the bytes read, the bytes in all and the records read."""

_SUFFIXES = {"sft": "", "dpo": "-pairs", "orpo": "-orpo", "kto": "-kto"}
"""What an entry's name ends in, by loss: what its rows became."""
_SHOWN, _NAMED = 20, 3
"""Rows that an error names, and those that are named of rows that are left out."""
_SECONDS_BETWEEN_LINES = 10.0
_HASHED_AT_ONCE = 32 * 2**20
"""Bytes."""


@dataclass(frozen=True)
class TokenisedFile:
    """Where the tokens of a source are; plain data that one process may send to others of its host.

    They are all that tasks learn from: what happens to the files afterwards disturbs nobody.

    Attributes:
        entry: Directory of the tokens.
    """

    entry: str


def as_source(given: str | os.PathLike[str] | DataSource) -> DataSource:
    """The source that a path by itself is."""
    if isinstance(given, DataSource):
        return given.source
    return DataSource.model_validate({"path": Path(given)})


class Reading(NamedTuple):
    """A source, and the loss of the tasks that its rows are read for."""

    source: DataSource
    loss: str = "sft"

    @property
    def key(self) -> str:
        """Tell equal readings from different ones."""
        return f"{self.loss}: {self.source.source.model_dump_json()}"


def tokenise_file(
    source: str | os.PathLike[str] | DataSource,
    tokenizer: PreTrainedTokenizerBase,
    cache: str | Path | None = None,
    progress: Progress | None = None,
    loss: str = "sft",
) -> TokenisedFile:
    """Find the tokens of a source in the cache, or else read, check and tokenise every row of it.

    Memory holds about 40 bytes a record meanwhile. Of several processes of a host that want the same tokens, one makes
    them while the others wait.

    Args:
        source: Files, or the path of one.
        tokenizer: The backbone's.
        cache: See `token_cache_directory`.
        progress: Told how far the pass is, if there is one.
        loss: Of the task: rows of a preference become other sequences.

    Raises:
        UserError: A file cannot be read, there are no records, there are bad rows, or no row can be used (all counted,
            the first ones named by file and number); or the cache cannot be written.
    """
    directory = token_cache_directory(cache)
    with closing(Selection(as_source(source))) as selection:
        fingerprint = selection.fingerprint(partial(file_digest, directory))
        name = _entry_name(fingerprint, tokenizer, loss)
        entry = directory / name
        if open_entry(entry) is None:
            with locked(directory / f".{name}.lock"):
                if open_entry(entry) is None:
                    reader = reader_of(tokenizer, loss)
                    _tokenise(selection, reader, directory, name, fingerprint, progress)
        return TokenisedFile(str(entry))


def cached_tokens(
    source: DataSource, tokenizer: PreTrainedTokenizerBase, cache: str | Path | None = None, loss: str = "sft"
) -> TokenisedFile | None:
    """The tokens of a source if they are in the cache and its files are small: that takes no time."""
    directory = token_cache_directory(cache)
    try:
        with closing(Selection(as_source(source))) as selection:
            if selection.size > _HASHED_AT_ONCE:
                return None
            fingerprint = selection.fingerprint(partial(file_digest, directory))
    except UserError:  # said by whoever reads them
        return None
    entry = directory / _entry_name(fingerprint, tokenizer, loss)
    return None if open_entry(entry) is None else TokenisedFile(str(entry))


def _entry_name(fingerprint: str, tokenizer: PreTrainedTokenizerBase, loss: str) -> str:
    return f"{fingerprint[:32]}-{tokenizer_fingerprint(tokenizer)[:16]}{_SUFFIXES[loss]}"


def opened_entry(tokenised: TokenisedFile, label: str) -> TokenCacheEntry:
    """Open what was made of a source.

    Raises:
        UserError: It is there no longer.
    """
    entry = open_entry(Path(tokenised.entry))
    if entry is None:
        raise UserError(f"{label}: its tokens were taken from the cache ({tokenised.entry}): begin again")
    return entry


def row_of(source: DataSource, entry: TokenCacheEntry, number: int) -> Row | None:
    """The row of a record, read again for a message; None if its file has become shorter."""
    with closing(Selection(source)) as selection:
        return next(islice(selection.rows(), entry.row(number), None), None)


def check_tokens(
    entry: TokenCacheEntry, source: DataSource, tokenizer: PreTrainedTokenizerBase, rows: int
) -> None:
    """Refuse tokens that a backbone's embedding lacks.

    Args:
        entry: What was made of the source.
        source: The files.
        tokenizer: Made the tokens.
        rows: Of the embedding.

    Raises:
        UserError: There is such a token; names the first one by file and row.
    """
    if entry.largest_token < rows:
        return
    number, token = entry.first_beyond(rows)
    row = row_of(source, entry, number)
    where = source.label if row is None else row.where
    raise UserError(
        f"{where}: becomes token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), which the backbone's embedding "
        f"of {rows:,} rows lacks: take tokens that were added out of the tokenizer beside the backbone, or resize the "
        "embedding (resize_token_embeddings) and save the backbone again"
    )


def progress_lines(label: object, say: Callable[[str], None]) -> Progress:
    """A line for people every ten seconds, for files that take longer than that.

    Args:
        label: Names the files.
        say: Shows a line.
    """
    start = last = time.monotonic()

    def tell(done: int, size: int, records: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            say(f"tokenising {label}: {done / size:.0%}, {records / (now - start):,.0f} records/s")

    return tell


def _tokenise(
    selection: Selection,
    reader: RowReader,
    directory: Path,
    name: str,
    fingerprint: str,
    progress: Progress | None,
) -> None:
    """Make the entry of open files."""
    records, kept = 0, 2 * reader.rows
    bad, unusable = _BadRows(selection.label, kept), _BadRows(selection.label, kept)
    try:
        with TokenCacheWriter(directory) as writer:
            for rows in _batches(selection, reader):
                good: list[tuple[int, Example]] = []
                # If there are too many the files are refused anyway: only count what is bad.
                for row, found in _sequences(reader, selection, rows, only_parse=bad.too_many):
                    if isinstance(found, BadRecordError):
                        (unusable if isinstance(found, UnusableRecordError) else bad).note(row, found)
                    else:
                        good.append((row.number, found))
                writer.add(good)
                records += len(rows)
                if progress is not None:
                    progress(rows[-1].done, selection.size, records)
            bad.raise_if_any()
            if not records:
                raise UserError(f"{selection.label}: is empty: it must hold at least one record")
            if unusable.count == records:
                unusable.raise_if_any()
            if not selection.is_unchanged:
                raise UserError(f"{selection.label}: was changed while it was read: begin again")
            notes = [*unusable.notes(records), *reader.chat_template.notes]
            writer.finish(name, fingerprint, notes)
    except OSError as error:
        raise UserError(
            f"{directory}: the tokens of {selection.label} cannot be kept there: {error.strerror or error}: make room, "
            "or choose another directory with --mux-data-cache"
        ) from error


def _sequences(
    reader: RowReader, selection: Selection, rows: Sequence[Row], only_parse: bool
) -> list[tuple[Row, Example | BadRecordError]]:
    try:
        return list(reader.sequences(selection, rows, only_parse))
    except UserError as error:
        raise UserError(*(f"{selection.label}: {text}" for text in error.problems)) from error


class _BadRows:
    """Counts rows that something is wrong with, and keeps those that are shown."""

    def __init__(self, label: str, kept: int) -> None:
        self._label = label
        self._kept = kept  # enough to show the first ones in order: a batch is tokenised late
        self.count = 0
        self._first: list[tuple[int, str]] = []

    @property
    def too_many(self) -> bool:
        """Whether there are more than are shown."""
        return self.count > _SHOWN

    def note(self, row: Row, error: BadRecordError) -> None:
        """Count a row."""
        self.count += 1
        if len(self._first) < self._kept:
            self._first.append((row.number, f"{row.where}: {error}"))

    def raise_if_any(self) -> None:
        """Raise a `UserError` that names them."""
        problems = self._shown(_SHOWN)
        if self.too_many:
            problems.append(
                f"{self._label}: {self.count} bad rows in all, of which the first are named above"
            )
        if problems:
            raise UserError(*problems)

    def notes(self, records: int) -> list[str]:
        """Say of how many rows they are, in lines for people; none if there are none."""
        if not self.count:
            return []
        more = " ..." if self.count > _NAMED else ""
        first = "; ".join(self._shown(_NAMED))
        return [f"{self.count:,} of {records:,} records cannot be used and were left out: {first}{more}"]

    def _shown(self, most: int) -> list[str]:
        return [text for _, text in sorted(self._first)[:most]]


def _batches(selection: Selection, reader: RowReader) -> Iterator[list[Row]]:
    """Rows that are read together, at least one."""
    before, rows = 0, list[Row]()
    for row in selection.rows():
        rows.append(row)
        if len(rows) >= reader.rows or row.done - before >= reader.nbytes:
            yield rows
            before, rows = row.done, []
    if rows:
        yield rows
