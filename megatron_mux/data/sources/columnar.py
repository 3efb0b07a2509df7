"""Arrow IPC and parquet files, read a batch of rows at a time. The place of a row is its number."""

from __future__ import annotations

import json
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.section import RECORD_KEYS, REFUSED_KEYS
from megatron_mux.data.sources.source import Row, Source
from megatron_mux.errors import UserError

# Rows (and bytes) that are turned into Python values together.
_ROWS = 256
_BYTES = 1 << 22


class Columnar(Source):
    """A file of typed columns.

    Args:
        path: The file.
        columns: Those that are read; None: those that a record may have.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        super().__init__(path)
        # Of the last row that was read by its place: the batches from there on, and the current one.
        self._reader: Iterator[tuple[int, Any]] = iter(())
        self._start, self._batch = 0, None
        self._rows = 0
        import pyarrow as pa

        try:
            names = self._open()
            # A file without any of them is shown with all its columns in the error.
            self._columns = [
                name for name in names if name in (columns or RECORD_KEYS + REFUSED_KEYS)
            ] or names
            self._rows = self._count()
        except (pa.ArrowException, OSError) as error:
            self.close()
            raise self._unreadable(error) from error

    @abstractmethod
    def _open(self) -> list[str]:
        """Open the file, and return the names of its columns."""

    @abstractmethod
    def _count(self) -> int:
        """Count its rows."""

    @abstractmethod
    def _batches(self, place: int) -> Iterator[tuple[int, Any]]:
        """Record batches with the number of the first row of each, from the one (or one before) that has a row."""

    def rows(self) -> Iterator[Row]:
        """See `Source.rows`."""
        import pyarrow as pa

        try:
            for start, batch in self._batches(0):
                rows = max(1, min(_ROWS, _BYTES * batch.num_rows // (batch.nbytes + 1)))
                for first in range(0, batch.num_rows, rows):
                    for number, value in enumerate(_values(batch.slice(first, rows)), start + first + 1):
                        yield Row(number - 1, f"row {number}", value, self.size * number // self._rows)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def count(self) -> int:
        """See `Source.count`."""
        return self._rows

    def row(self, place: int) -> Any:
        """See `Source.row`."""
        import pyarrow as pa

        if not 0 <= place < self._rows:
            raise BadRecordError("there is no record")
        try:
            # Records are mostly read in order: then the batch is here, or the next one.
            ahead = self._batch is not None and self._start <= place < self._start + 2 * self._batch.num_rows
            if not ahead:
                self._reader, self._batch = self._batches(place), None
            while self._batch is None or place >= self._start + self._batch.num_rows:
                self._start, self._batch = next(self._reader)
        except (pa.ArrowException, OSError, StopIteration) as error:
            self._batch = None
            raise BadRecordError(f"cannot be read: {error}") from error
        (value,) = _values(self._batch.slice(place - self._start, 1))
        return value

    def close(self) -> None:
        """See `Source.close`."""
        self._reader, self._batch = iter(()), None
        super().close()

    def _unreadable(self, error: Exception) -> UserError:
        return UserError(f"{self.path}: cannot be read: {' '.join(str(error).split())}")


class Arrow(Columnar):
    """An Arrow IPC file (Feather) or stream (as `datasets` saves), mapped into memory."""

    def _open(self) -> list[str]:
        import pyarrow as pa

        self._mapped = pa.memory_map(str(self.path))
        self.file.seek(0)
        self._is_stream = self.file.read(6) != b"ARROW1"
        names: list[str] = self._ipc(None).schema.names
        return names

    def _ipc(self, columns: Sequence[str] | None) -> Any:
        import pyarrow as pa

        self._mapped.seek(0)
        kind = pa.ipc.open_stream if self._is_stream else pa.ipc.open_file
        options = pa.ipc.IpcReadOptions(ensure_native_endian=True)
        if columns is not None:
            names = self._ipc(None).schema.names
            self._mapped.seek(0)
            options = pa.ipc.IpcReadOptions(included_fields=[names.index(column) for column in columns])
        return kind(self._mapped, options=options)

    def _each(self, first: int) -> Iterator[Any]:
        reader = self._ipc(self._columns)
        if self._is_stream:
            yield from reader
        else:
            yield from (reader.get_batch(i) for i in range(first, reader.num_record_batches))

    def _count(self) -> int:
        self._starts: list[int] = [0, *accumulate(batch.num_rows for batch in self._each(0))]
        return self._starts[-1]

    def _batches(self, place: int) -> Iterator[tuple[int, Any]]:
        first = 0 if self._is_stream else bisect_right(self._starts, place) - 1
        return zip(self._starts[first:], self._each(first), strict=False)

    def close(self) -> None:
        """See `Source.close`."""
        super().close()
        self._mapped.close()


class Parquet(Columnar):
    """A parquet file."""

    def _open(self) -> list[str]:
        import pyarrow.parquet as pq

        self._parquet = pq.ParquetFile(self.file, buffer_size=1 << 20, pre_buffer=False)
        names: list[str] = self._parquet.schema_arrow.names
        return names

    def _count(self) -> int:
        groups = self._parquet.metadata
        self._starts: list[int] = [
            0,
            *accumulate(groups.row_group(i).num_rows for i in range(groups.num_row_groups)),
        ]
        return self._starts[-1]

    def _batches(self, place: int) -> Iterator[tuple[int, Any]]:
        groups = range(bisect_right(self._starts, place) - 1, len(self._starts) - 1)
        start = self._starts[groups.start]
        for group in groups:
            about = self._parquet.metadata.row_group(group)
            rows = max(1, min(_ROWS, _BYTES * about.num_rows // (about.total_byte_size + 1)))
            for batch in self._parquet.iter_batches(rows, [group], self._columns, use_threads=False):
                yield start, batch
                start += batch.num_rows


def _values(batch: Any) -> list[dict[str, Any]]:
    """Rows as Python values: JSON columns decoded, and no keys inside values that a row lacks."""
    columns = {
        name: [_decoded(value, kind) for value in column.to_pylist()]
        for name, kind, column in zip(batch.schema.names, batch.schema.types, batch.columns, strict=True)
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _decoded(value: Any, kind: Any) -> Any:
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        try:
            return json.loads(value)
        except ValueError:
            return value
    if pa.types.is_struct(kind):
        fields = ((kind.field(i), value[kind.field(i).name]) for i in range(kind.num_fields))
        return {field.name: _decoded(inner, field.type) for field, inner in fields if inner is not None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_decoded(inner, kind.value_type) for inner in value]
    return value
