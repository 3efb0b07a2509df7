"""One pass over a data file: every record to tokens in the cache, or everything that is wrong with the file."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

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
# Records (and bytes) that are tokenised together.
_BATCH = 256
_BATCH_BYTES = 1 << 22
_SECONDS_BETWEEN_LINES = 10.0


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
    try:
        with TokenCacheWriter(directory) as writer:
            scan = _Scan(path, tokeniser, writer, progress)
            size = os.fstat(file.fileno()).st_size
            offset = 0
            for number, line in enumerate(_lines(path, file), 1):
                scan.line(number, offset, line, size)
                offset += len(line)
            scan.finish()
            if progress is not None:
                progress(offset, offset, scan.records)
            return writer.finish(scan.fingerprint[:32] + suffix, scan.fingerprint, offset)
    except OSError as error:
        raise UserError(
            f"{directory}: the tokens of {path} cannot be kept there: {error.strerror or error}: make room, or choose "
            "another directory with --mux-data-cache"
        ) from error


class _Scan:
    """The state of a pass.

    Attributes:
        records: Read so far.
    """

    def __init__(
        self, path: Path, tokeniser: Tokeniser, writer: TokenCacheWriter, progress: Progress | None
    ) -> None:
        self._path = path
        self._tokeniser = tokeniser
        self._writer = writer
        self._progress = progress
        self._hash = hashlib.sha256()
        self._pending: list[tuple[int, int, Record]] = []
        self._pending_bytes = 0
        self._bad: list[tuple[int, str]] = []
        self._bad_count = 0
        self.records = 0

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the lines so far."""
        return self._hash.hexdigest()

    def line(self, number: int, offset: int, line: bytes, size: int) -> None:
        """Take the next line."""
        if number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            raise UserError(f"{self._path}: is one JSON array: write one JSON object a line (JSON Lines)")
        self._hash.update(line)
        try:
            record = parse_record(line)
        except BadRecordError as error:
            self._note(number, str(error))
            return
        if record is not None:
            self.records += 1
            self._pending.append((number, offset, record))
            self._pending_bytes += len(line)
        if len(self._pending) >= _BATCH or self._pending_bytes >= _BATCH_BYTES:
            self._flush()
            if self._progress is not None:
                self._progress(offset + len(line), size, self.records)

    def finish(self) -> None:
        """Tokenise the last records; raise if anything was wrong."""
        self._flush()
        if self._bad_count:
            problems = [f"{self._path}: line {number}: {text}" for number, text in sorted(self._bad)[:_SHOWN]]
            if self._bad_count > _SHOWN:
                problems.append(
                    f"{self._path}: {self._bad_count} bad lines in all, of which the first are named above"
                )
            raise UserError(*problems)
        if not self.records:
            raise UserError(f"{self._path}: is empty: it must hold at least one record")

    def _flush(self) -> None:
        """Tokenise the records that were read since the last flush."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if self._bad_count > _SHOWN:
            return  # the file is refused anyway: only count what is bad
        try:
            examples = self._tokeniser.encode_many([record for _, _, record in pending])
        except UserError as error:
            raise UserError(*(f"{self._path}: {text}" for text in error.problems)) from error
        good: list[tuple[int, Example]] = []
        for (number, offset, _), example in zip(pending, examples, strict=True):
            if isinstance(example, BadRecordError):
                self._note(number, str(example))
            else:
                good.append((offset, example))
        self._writer.add([offset for offset, _ in good], [example for _, example in good])

    def _note(self, number: int, text: str) -> None:
        self._bad_count += 1
        if len(self._bad) < 2 * _BATCH:  # enough to name the first ones in order: a batch is tokenised late
            self._bad.append((number, text))


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from file
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
