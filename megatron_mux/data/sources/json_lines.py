"""JSON Lines: one JSON object a line, blank lines skipped.

The reader of `datasets` (5.2) would not do. It takes rows of mixed shapes and types, but makes times of texts that
look like times, floats of large integers, and nulls of keys that a row lacks. It refuses a whole file for a key that is
there twice or for half a surrogate pair, and names neither file nor line where a line is no JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.records import parse_json
from megatron_mux.data.sources.source import Row, Source, unreadable

_MARK = b"\xef\xbb\xbf"  # of byte order, which some editors put at a file's beginning


class JsonLines(Source):
    """A JSON Lines file."""

    def rows(self) -> Iterator[Row]:
        """See `Source.rows`."""
        done = 0
        try:
            self.file.seek(0)
            for number, line in enumerate(self.file, 1):
                done += len(line)
                if line.removeprefix(_MARK).strip():
                    yield Row(f"line {number}", _parsed(line), done)
        except OSError as error:
            raise unreadable(self.path, error) from error

    def count(self) -> int:
        """See `Source.count`."""
        self.file.seek(0)
        return sum(1 for line in self.file if line.removeprefix(_MARK).strip())


def _parsed(line: bytes) -> Any | BadRecordError:
    try:
        return parse_json(line.removeprefix(_MARK))
    except BadRecordError as error:
        return error
