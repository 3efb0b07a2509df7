"""One pass over a data file: where its usable records lie, how long they are, and everything wrong with it."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_mux.data.records import BadRecordError, Record, parse_record
from megatron_mux.data.tokenise import Example, Tokeniser
from megatron_mux.errors import UserError

MOST_DISTINCT = 16
"""A file with at most this many distinct completions is one of choices (see design: `eval_accuracy`)."""

Progress = Callable[[int, int], None]
"""Called now and then with the bytes read and the bytes in all."""

_SHOWN = 20
# Records (and bytes) that are tokenised together.
_BATCH = 256
_BATCH_BYTES = 1 << 22


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """What a pass over a file found; plain data that one rank may send to the others.

    Attributes:
        offsets: `[n]` int64, where each usable record's line begins.
        lengths: `[n]` int32, its tokens.
        label_counts: `[n]` int32, its labelled tokens.
        dropped: Records without a labelled token after the cut, left out.
        distinct_completions: At most `MOST_DISTINCT`, in order of appearance; None when there are more, or when a
            record has no completion.
        max_length: What sequences were cut to.
        size: Bytes of the file.
        fingerprint: SHA-256 of the file.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    label_counts: npt.NDArray[np.int32]
    dropped: int
    distinct_completions: list[str] | None
    max_length: int
    size: int
    fingerprint: str


def build_index(path: Path, tokeniser: Tokeniser, progress: Progress | None = None) -> DatasetIndex:
    """Read, check and tokenise every line of a file once; memory holds 16 bytes a record.

    Args:
        path: JSON Lines file.
        tokeniser: Turns its records into examples.
        progress: Told how far the pass is.

    Returns:
        The index.

    Raises:
        UserError: The file cannot be read, has bad lines (all counted, the first ones named by number), or no usable
            record.
    """
    scan = _Scan(path, tokeniser, progress)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            number, offset = 0, 0
            for number, line in enumerate(file, 1):
                scan.line(number, offset, line, size)
                offset += len(line)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    scan.flush()
    return scan.index(offset)


class _Scan:
    """The state of a pass."""

    def __init__(self, path: Path, tokeniser: Tokeniser, progress: Progress | None) -> None:
        self._path = path
        self._tokeniser = tokeniser
        self._progress = progress
        self._hash = hashlib.sha256()
        self._pending: list[tuple[int, int, Record]] = []
        self._pending_bytes = 0
        self._bad: list[tuple[int, str]] = []
        self._bad_count = 0
        self._records = 0
        self._dropped = 0
        self._offsets, self._lengths, self._labels = array("q"), array("i"), array("i")
        self._completions: dict[str, None] | None = {}

    def line(self, number: int, offset: int, line: bytes, size: int) -> None:
        if number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            raise UserError(f"{self._path}: is one JSON array: write one JSON object a line (JSON Lines)")
        self._hash.update(line)
        try:
            record = parse_record(line)
        except BadRecordError as error:
            self._note(number, str(error))
            return
        if record is not None:
            self._records += 1
            self._pending.append((number, offset, record))
            self._pending_bytes += len(line)
        if len(self._pending) >= _BATCH or self._pending_bytes >= _BATCH_BYTES:
            self.flush()
            if self._progress is not None:
                self._progress(offset + len(line), size)

    def flush(self) -> None:
        """Tokenise the records read so far."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if self._bad_count > _SHOWN:
            return  # the file is refused anyway: only count what is bad
        try:
            examples = self._tokeniser.encode_many([record for _, _, record in pending])
        except UserError as error:
            raise UserError(*(f"{self._path}: {text}" for text in error.problems)) from error
        for (number, offset, _), example in zip(pending, examples, strict=True):
            if isinstance(example, BadRecordError):
                self._note(number, str(example))
            elif example.label_count == 0:
                self._dropped += 1
            else:
                self._add(offset, example)

    def _add(self, offset: int, example: Example) -> None:
        self._offsets.append(offset)
        self._lengths.append(len(example.tokens))
        self._labels.append(example.label_count)
        if self._completions is None:
            return
        if example.completion_text is None:
            self._completions = None
            return
        self._completions[example.completion_text] = None
        if len(self._completions) > MOST_DISTINCT:
            self._completions = None

    def _note(self, number: int, text: str) -> None:
        self._bad_count += 1
        if len(self._bad) < 2 * _BATCH:  # enough to name the first ones in order: a batch is tokenised late
            self._bad.append((number, text))

    def index(self, size: int) -> DatasetIndex:
        if self._bad_count:
            problems = [f"{self._path}: line {number}: {text}" for number, text in sorted(self._bad)[:_SHOWN]]
            if self._bad_count > _SHOWN:
                problems.append(
                    f"{self._path}: {self._bad_count} bad lines in all, of which the first are named above"
                )
            raise UserError(*problems)
        if not self._records:
            raise UserError(f"{self._path}: is empty: it must hold at least one record")
        if not self._offsets:
            raise UserError(
                f"{self._path}: none of its {self._records} records has a token to learn within data.max_length "
                f"{self._tokeniser.max_length}: raise it, or give the records something to learn"
            )
        if self._progress is not None:
            self._progress(size, size)
        return DatasetIndex(
            offsets=np.array(self._offsets, np.int64),
            lengths=np.array(self._lengths, np.int32),
            label_counts=np.array(self._labels, np.int32),
            dropped=self._dropped,
            distinct_completions=None if self._completions is None else list(self._completions),
            max_length=self._tokeniser.max_length,
            size=size,
            fingerprint=self._hash.hexdigest(),
        )
