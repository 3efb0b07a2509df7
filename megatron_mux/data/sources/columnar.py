"""Arrow IPC and parquet files, read a batch of rows at a time."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_mux.data.section import OPENAI_KEYS, RECORD_KEYS, REFUSED_KEYS
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
        import pyarrow as pa

        try:
            names = self._open()
            # A file without any of them is shown with all its columns in the error.
            self._columns = [
                name for name in names if name in (columns or RECORD_KEYS + OPENAI_KEYS + REFUSED_KEYS)
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
    def _batches(self) -> Iterator[Any]:
        """Its record batches."""

    def rows(self) -> Iterator[Row]:
        """See `Source.rows`."""
        import pyarrow as pa

        number = 0
        try:
            for batch in self._batches():
                rows = max(1, min(_ROWS, _BYTES * batch.num_rows // (batch.nbytes + 1)))
                for first in range(0, batch.num_rows, rows):
                    for value in _values(batch.slice(first, rows)):
                        number += 1
                        yield Row(f"row {number}", value, self.size * number // self._rows)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def count(self) -> int:
        """See `Source.count`."""
        return self._rows

    def _unreadable(self, error: Exception) -> UserError:
        return UserError(f"{self.path}: cannot be read: {' '.join(str(error).split())}")


class Arrow(Columnar):
    """An Arrow IPC file (Feather) or stream (as `datasets` saves), mapped into memory."""

    def _open(self) -> list[str]:
        import pyarrow as pa

        self._mapped = pa.memory_map(str(self.path))
        self._is_stream = not self.file.peek(6).startswith(b"ARROW1")
        names: list[str] = self._ipc(None).schema.names
        self._names = names
        return names

    def _ipc(self, columns: Sequence[str] | None) -> Any:
        import pyarrow as pa

        fields = None if columns is None else [self._names.index(column) for column in columns]
        options = pa.ipc.IpcReadOptions(ensure_native_endian=True, included_fields=fields)
        self._mapped.seek(0)
        return (pa.ipc.open_stream if self._is_stream else pa.ipc.open_file)(self._mapped, options=options)

    def _count(self) -> int:
        return sum(batch.num_rows for batch in self._batches())

    def _batches(self) -> Iterator[Any]:
        reader = self._ipc(self._columns)
        if self._is_stream:
            return iter(reader)
        return (reader.get_batch(i) for i in range(reader.num_record_batches))


class Parquet(Columnar):
    """A parquet file."""

    def _open(self) -> list[str]:
        import pyarrow.parquet as pq

        self._parquet = pq.ParquetFile(self.file, buffer_size=1 << 20, pre_buffer=False)
        names: list[str] = self._parquet.schema_arrow.names
        return names

    def _count(self) -> int:
        return int(self._parquet.metadata.num_rows)

    def _batches(self) -> Iterator[Any]:
        for i in range(self._parquet.num_row_groups):
            group = self._parquet.metadata.row_group(i)
            rows = max(1, min(_ROWS, _BYTES * group.num_rows // (group.total_byte_size + 1)))
            yield from self._parquet.iter_batches(rows, [i], self._columns, use_threads=False)


def _values(batch: Any) -> list[dict[str, Any]]:
    """Rows as Python values: JSON columns decoded, and no keys inside values that a row lacks."""
    kinds = list(zip(batch.schema.names, batch.schema.types, strict=True))
    return [{name: _decoded(row[name], kind) for name, kind in kinds} for row in batch.to_pylist()]


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
