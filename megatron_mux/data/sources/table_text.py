"""CSV and TSV: a header, then one row a line; every value is text."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.sources.source import Row, Source, unreadable
from megatron_mux.errors import UserError


class TableText(Source):
    """A file of values between commas or tabs, with the names of the columns in its first line.

    Args:
        path: The file.
        delimiter: Between two values.
    """

    def __init__(self, path: Path, delimiter: str) -> None:
        super().__init__(path)
        self._delimiter = delimiter
        csv.field_size_limit(sys.maxsize)  # of the whole process, but no one relies on its default

    def rows(self) -> Iterator[Row]:
        """See `Source.rows`."""
        try:
            self.file.seek(0)
            lines = _Lines(self.file)
            reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
            number = 0
            header = next(reader, [])
            self._check(header)
            while True:
                line = lines.number + 1
                cells = next(reader, None)
                if cells is None:
                    return
                if cells:  # else a blank line
                    number += 1
                    yield Row(f"row {number} (line {line})", _row(header, cells), lines.byte)
        except OSError as error:
            raise unreadable(self.path, error) from error
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: line {lines.number + 1}: not UTF-8 text") from error
        except csv.Error as error:
            raise UserError(f"{self.path}: line {lines.number}: not valid CSV: {error}") from error

    def _check(self, header: list[str]) -> None:
        twice = {name for name in header if header.count(name) > 1}
        if twice:
            raise UserError(
                f"{self.path}: its header has {', '.join(sorted(map(repr, twice)))} more than once"
            )


class _Lines:
    """Decoded lines of a file; `byte` and `number` tell how far they were read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.byte, self.number = file.tell(), 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        text = line.decode("utf-8-sig" if self.byte == 0 else "utf-8")
        self.byte += len(line)
        self.number += 1
        return text


def _row(header: list[str], cells: list[str]) -> dict[str, str] | BadRecordError:
    if len(cells) == len(header):
        return dict(zip(header, cells, strict=True))
    return BadRecordError(f"has {len(cells)} values, but the header names {len(header)} columns")
