"""JSON Lines: one JSON object a line, blank lines skipped. The place of a row is its first byte."""

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
        offset = 0
        try:
            self.file.seek(0)
            for number, line in enumerate(self.file, 1):
                start, offset = offset, offset + len(line)
                if line.removeprefix(_MARK).strip():
                    yield Row(start, f"line {number}", _parsed(line), offset)
        except OSError as error:
            raise unreadable(self.path, error) from error

    def count(self) -> int:
        """See `Source.count`."""
        self.file.seek(0)
        return sum(1 for line in self.file if line.removeprefix(_MARK).strip())

    def row(self, place: int) -> Any:
        """See `Source.row`."""
        # A reader of its own: another one's buffer may hold what the file held before.
        with open(self.file.fileno(), "rb", closefd=False) as file:
            file.seek(place)
            line = file.readline().removeprefix(_MARK)
        if not line.strip():
            raise BadRecordError("there is no record")
        return parse_json(line)


def _parsed(line: bytes) -> Any | BadRecordError:
    try:
        return parse_json(line.removeprefix(_MARK))
    except BadRecordError as error:
        return error
