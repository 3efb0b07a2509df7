"""The rows that a task's section names: of several files, of a split, a slice; with the columns that it maps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, islice
from typing import Any, TypeVar

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.records import listed
from megatron_mux.data.section import DataSource, template_columns
from megatron_mux.data.sources.json_lines import JsonLines
from megatron_mux.data.sources.locate import is_sliced, locate, open_file, row_ranges
from megatron_mux.data.sources.source import Row, Source
from megatron_mux.errors import UserError

T = TypeVar("T")


class Selection:
    """The rows of a source, in order.

    Args:
        source: What a task file says.

    Attributes:
        label: Names it in messages.
        files: Its files.
        size: Bytes of its files.

    Raises:
        UserError: It is not there, a file cannot be read, or it is open which files are meant.
    """

    def __init__(self, source: DataSource) -> None:
        self._source = source
        self.label = source.label
        self._layout = _Layout(source)
        located, self._asked = locate(source)
        self.files: list[Source] = []
        try:
            for path, _ in located:
                self.files.append(open_file(path, self._layout.columns))
        except BaseException:
            self.close()
            raise
        self._splits = [split for _, split in located]
        self.size = sum(file.size for file in self.files)

    def rows(self) -> Iterator[Row]:
        """All rows; `Row.where` begins with the file, and `Row.value` is a mapping of a record's keys."""
        numbers = count()
        for file, start, stop, before in self._parts():
            for row in islice(file.rows(), start, stop):
                value = self._mapped(row.value)
                yield Row(f"{file.path}: {row.where}", value, before + row.done, next(numbers))

    def read(self, value: Any, parse: Callable[[Any], T]) -> T:
        """Read the record of a row, with its columns' names in what is said of a bad one.

        Args:
            value: Of the row.
            parse: Makes a record of a mapping.

        Raises:
            BadRecordError: It holds none.
        """
        if isinstance(value, BadRecordError):
            raise value
        try:
            return parse(value)
        except BadRecordError as error:
            raise BadRecordError(f"{error}{self._layout.origin(str(error))}") from None

    @property
    def is_unchanged(self) -> bool:
        """Whether the files have not been written to since they were opened."""
        return all(file.is_unchanged for file in self.files)

    def fingerprint(self, digest: Callable[[Source], str] = Source.digest) -> str:
        """Identify the rows and what becomes of them: SHA-256 of the files and of the section's other fields.

        Args:
            digest: Gives that of a file.
        """
        digests = [digest(file) for file in self.files]
        options = {
            "columns": self._source.columns,
            "templates": self._source.templates,
            "chat_template_kwargs": self._source.chat_template_kwargs,
            "slices": self._asked if is_sliced(self._asked) else None,
            "splits": self._splits if is_sliced(self._asked) else None,
            "kinds": [type(file).__name__ for file in self.files],
        }
        plain = len(digests) == 1 and isinstance(self.files[0], JsonLines)
        if plain and not any(options[key] for key in options if key != "kinds"):
            return digests[0]  # as it was before there were other sources
        about = {"files": digests, **{key: value for key, value in options.items() if value}}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            with suppress(OSError):
                file.close()

    def _parts(self) -> Iterator[tuple[Source, int, int | None, int]]:
        """The parts of files: the file, first row, the row after the last, bytes of the files before."""
        if not is_sliced(self._asked):
            before = 0
            for file in self.files:
                yield file, 0, None, before
                before += file.size
            return
        counts = [file.count() for file in self.files]
        totals = dict.fromkeys(self._splits, 0)
        for split, rows in zip(self._splits, counts, strict=True):
            totals[split] += rows
        try:
            ranges = row_ranges(self._asked, totals)
        except ValueError as error:
            raise UserError(
                f"{self.label}: split: must be such as train[:90%] or train[100:200], got {self._asked!r}: {error}"
            ) from error
        for wanted, start, stop in ranges:
            first = before = 0
            for file, split, rows in zip(self.files, self._splits, counts, strict=True):
                if split == wanted:
                    if start < first + rows and stop > first:
                        yield file, max(0, start - first), min(rows, stop - first), before
                    first += rows
                before += file.size

    def _mapped(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            return self._layout.apply(value)
        except BadRecordError as error:
            return error


class _Layout:
    """What becomes of a row's columns.

    Attributes:
        columns: The columns that are read; None: those with the names of a record's keys.
    """

    def __init__(self, source: DataSource) -> None:
        self._columns = source.columns
        self._templates = source.templates
        self._options = source.chat_template_kwargs
        named = {name for template in self._templates.values() for name in template_columns(template)}
        wanted = sorted(named | set(self._columns.values()))
        self.columns: list[str] | None = wanted or None

    def apply(self, row: dict[str, Any]) -> dict[str, Any]:
        """The keys of a record.

        Raises:
            BadRecordError: A column is missing, or no text.
        """
        if self.columns is not None:
            for column in self.columns:
                if column not in row:
                    raise BadRecordError(f"has no column {column!r}, only {listed(row)}")
            found = {key: row[column] for key, column in self._columns.items()}
            for key, template in self._templates.items():
                found[key] = template.format(
                    **{name: _text(name, row[name]) for name in template_columns(template)}
                )
            row = found
        if self._options:
            own = row.get("chat_template_kwargs") or {}
            row = {**row, "chat_template_kwargs": {**self._options, **own} if isinstance(own, dict) else own}
        return row

    def origin(self, problem: str) -> str:
        """Name the columns of the keys in a message."""
        named = [f"{key} is column {name!r}" for key, name in self._columns.items() if f'"{key}"' in problem]
        return f" ({', '.join(named)})" if named else ""


def _text(column: str, value: Any) -> str:
    if isinstance(value, (str, int, float)):
        return str(value)
    kind = "null" if value is None else type(value).__name__
    raise BadRecordError(f"column {column!r} must be text or a number, as data.templates uses it, got {kind}")
