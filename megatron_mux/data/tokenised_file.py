"""One pass over a data file: every record to tokens in the cache, or everything that is wrong with the file."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from megatron_mux.data.records import BadRecordError, Record, parse_record
from megatron_mux.data.token_cache import TokenCacheEntry, TokenCacheWriter, token_cache_directory
from megatron_mux.data.tokenise import Example, Tokeniser
from megatron_mux.data.tokenizer import tokenizer_fingerprint
from megatron_mux.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int, int], None]
"""Called now and then with the bytes read, the bytes in all and the records read."""

_SHOWN = 20
# Lines (and bytes) that are tokenised together.
_BATCH = 256
_BATCH_BYTES = 1 << 22
_SECONDS_BETWEEN_LINES = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class TokenisedFile:
    """Where the tokens of a data file are; plain data that one process may send to others of its host.

    Attributes:
        entry: Directory of the tokens.
        size, modified_ns: Of the file when it was tokenised.
    """

    entry: str
    size: int
    modified_ns: int

    def is_of(self, file: IO[bytes]) -> bool:
        """Whether the open file has not been written to since."""
        status = os.fstat(file.fileno())
        return (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns)


def tokenise_file(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> TokenisedFile:
    """Find a file's tokens in the cache, or else read, check and tokenise every line of it.

    Memory holds about 40 bytes a record meanwhile.

    Args:
        path: JSON Lines file.
        tokenizer: The backbone's.
        cache: See `token_cache_directory`.
        progress: Told how far the pass is, if there is one.

    Raises:
        UserError: The file cannot be read, is empty, or has bad lines (all counted, the first ones named by number); or
            the cache cannot be written.
    """
    directory = token_cache_directory(cache)
    tokeniser = Tokeniser(tokenizer, None)
    suffix = f"-{tokenizer_fingerprint(tokenizer)[:16]}"
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            name = hashlib.file_digest(file, "sha256").hexdigest()[:32] + suffix
            try:
                entry = TokenCacheEntry(directory / name).directory
            except (OSError, ValueError, KeyError):
                file.seek(0)
                entry = _tokenise(path, file, tokeniser, directory, suffix, progress)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    return TokenisedFile(str(entry), status.st_size, status.st_mtime_ns)


def progress_lines(path: Path, say: Callable[[str], None]) -> Progress:
    """A line for people every ten seconds, for files that take longer than that.

    Args:
        path: The file.
        say: Shows a line.
    """
    start = last = time.monotonic()

    def tell(done: int, size: int, records: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            say(f"tokenising {path}: {done / size:.0%}, {records / (now - start):,.0f} records/s")

    return tell


def _tokenise(
    path: Path, file: IO[bytes], tokeniser: Tokeniser, directory: Path, suffix: str, progress: Progress | None
) -> Path:
    """Make the entry of an open file."""
    size = os.fstat(file.fileno()).st_size
    digest, bad, records, offset = hashlib.sha256(), _BadLines(path), 0, 0
    try:
        with TokenCacheWriter(directory) as writer:
            for number, lines in _batches(path, file):
                digest.update(b"".join(lines))
                parsed: list[tuple[int, int, Record]] = []
                for i, line in enumerate(lines, number):
                    record = bad.note(i, _parsed(line))
                    if record is not None:
                        parsed.append((i, offset, record))
                    offset += len(line)
                records += len(parsed)
                if not bad.too_many:  # else the file is refused anyway: only count what is bad
                    examples = _encoded(path, tokeniser, [record for _, _, record in parsed])
                    good = [(at, bad.note(i, one)) for (i, at, _), one in zip(parsed, examples, strict=True)]
                    writer.add([(at, example) for at, example in good if example is not None])
                if progress is not None:
                    progress(offset, size, records)
            bad.raise_if_any()
            if not records:
                raise UserError(f"{path}: is empty: it must hold at least one record")
            return writer.finish(digest.hexdigest()[:32] + suffix, digest.hexdigest(), offset)
    except OSError as error:
        raise UserError(
            f"{directory}: the tokens of {path} cannot be kept there: {error.strerror or error}: make room, or choose "
            "another directory with --mux-data-cache"
        ) from error


class _BadLines:
    """Counts lines that hold no record, and keeps those that are shown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self._first: list[tuple[int, str]] = []

    @property
    def too_many(self) -> bool:
        """Whether there are more than are shown."""
        return self._count > _SHOWN

    def note(self, number: int, found: T | BadRecordError) -> T | None:
        """What was made of a line, unless that is a mistake: then it is counted."""
        if not isinstance(found, BadRecordError):
            return found
        self._count += 1
        if len(self._first) < 2 * _BATCH:  # enough to show the first ones in order: a batch is tokenised late
            self._first.append((number, str(found)))
        return None

    def raise_if_any(self) -> None:
        """Raise a `UserError` that names them."""
        problems = [f"{self._path}: line {number}: {text}" for number, text in sorted(self._first)[:_SHOWN]]
        if self.too_many:
            problems.append(
                f"{self._path}: {self._count} bad lines in all, of which the first are named above"
            )
        if problems:
            raise UserError(*problems)


def _parsed(line: bytes) -> Record | BadRecordError | None:
    try:
        return parse_record(line)
    except BadRecordError as error:
        return error


def _encoded(path: Path, tokeniser: Tokeniser, records: list[Record]) -> list[Example | BadRecordError]:
    try:
        return tokeniser.encode_many(records)
    except UserError as error:
        raise UserError(*(f"{path}: {text}" for text in error.problems)) from error


def _batches(path: Path, file: IO[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Lines that are tokenised together, with the number of the first."""
    number, size, lines = 1, 0, list[bytes]()
    try:
        for line in file:
            if number == 1 and not lines and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                raise UserError(f"{path}: is one JSON array: write one JSON object a line (JSON Lines)")
            lines.append(line)
            size += len(line)
            if len(lines) >= _BATCH or size >= _BATCH_BYTES:
                yield number, lines
                number, size, lines = number + len(lines), 0, []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if lines:
        yield number, lines
