"""The safetensors of a Hugging Face directory: their headers, checked, and any part of a tensor on demand."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.files import read_json

_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
_READABLE = _DTYPES | _QUANTISED_DTYPES
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Stored:
    """Where a tensor is stored: file, safetensors dtype, shape, and the offset of its first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class Checkpoint:
    """The tensors of a directory. Use it as a context manager: files stay open inside.

    Args:
        path: The directory.

    Raises:
        UserError: There are no safetensors, or a file is unreadable, truncated or damaged.

    Attributes:
        tensors: By name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        self._digest = hashlib.sha256()
        self._open: dict[Path, int] = {}
        self._stack = ExitStack()
        self._read_headers()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._open.clear()

    def _read_headers(self) -> None:
        """Fill `tensors` and `_digest`."""
        for file in self._files():
            self._read_header(file)

    def _files(self) -> list[Path]:
        index = self.path / _INDEX
        if index.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise UserError(f"{index} has no weight_map.")
            return [self.path / name for name in sorted(set(names.values()))]
        files = sorted(
            f
            for f in self.path.glob("*.safetensors")
            if not f.name.startswith(("adapter_model", "consolidated"))
        )
        if not files:
            others = sorted(f.name for f in self.path.glob("*.bin"))
            hint = f" It has {others[0]}: save the model again as safetensors." if others else ""
            raise UserError(f"{self.path} holds no *.safetensors.{hint}")
        return files

    def _read_header(self, file: Path) -> None:
        try:
            size = file.stat().st_size
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                    raise ValueError("its header is cut or damaged")
                header = stream.read(length)
                entries = json.loads(header)
                self._digest.update(header)
                self._sample(stream, 8 + length, size)
            self._add(file, entries, 8 + length, size)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror or error}.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is not a complete safetensors file: {error}.") from None

    def _sample(self, stream: Any, start: int, stop: int) -> None:
        for i in range(_SAMPLES):
            stream.seek(start + (stop - start) * i // _SAMPLES)
            self._digest.update(stream.read(_SAMPLE_BYTES))

    def _add(self, file: Path, entries: dict[str, Any], data: int, size: int) -> None:
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if data + end != size:
            raise ValueError(f"its tensors take {end} bytes, but it has {size - data}")
        for name, entry in entries.items():
            if name in self.tensors:
                raise ValueError(f"{name} is also in {self.tensors[name].file.name}")
            start, stop = entry["data_offsets"]
            stored = Stored(file, entry["dtype"], tuple(entry["shape"]), data + start)
            known = _READABLE.get(stored.dtype)
            if known is not None and stop - start != math.prod(stored.shape) * known.itemsize:
                raise ValueError(f"{name} of shape {list(stored.shape)} takes {stop - start} bytes")
            self.tensors[name] = stored

    @property
    def digest(self) -> str:
        """SHA-256 over headers and samples of the data."""
        return self._digest.hexdigest()

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype, which `check_dtype` accepts."""
        return _DTYPES[self.tensors[name].dtype]

    def check_dtype(self, name: str, supported: Collection[str] = ()) -> str | None:
        """The problem with a tensor's dtype; None if it is supported.

        Args:
            name: Of the tensor.
            supported: Safetensors dtypes that it may have; empty: any of weights that are not quantised.
        """
        stored = self.tensors[name]
        if stored.dtype in (supported or _DTYPES):
            return None
        return (
            f"{stored.file} stores {name} as {stored.dtype}: supported are {', '.join(supported or _DTYPES)}"
        )

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        """A part of a tensor, in its stored dtype, on the CPU; nothing else of the file is read.

        Args:
            name: Of the tensor.
            rows: Along its first dimension.
            columns: Along its second, where it has one.
        """
        return self._read(self.tensors[name], rows, columns)

    def _read(self, stored: Stored, rows: slice, columns: slice | None) -> Tensor:
        dtype = _READABLE[stored.dtype]
        first, last, _ = rows.indices(stored.shape[0])
        count = max(0, last - first)
        width = math.prod(stored.shape[1:])
        left, right, _ = columns.indices(width) if columns is not None else (0, width, 1)
        shape = (count, *stored.shape[1:]) if columns is None else (count, right - left)
        start = stored.start + (first * width + left) * dtype.itemsize
        # Read, not mapped: the pages of a mapped file would count as this process's memory.
        place = bytearray(count * (right - left) * dtype.itemsize)
        whole = right - left == width or count == 1
        pieces: Iterable[bytearray | memoryview] = [place] if whole else _split(place, count)
        try:
            file = self._file(stored.file)
            for row, piece in enumerate(pieces):
                _read_all(file, piece, start + row * width * dtype.itemsize)
        except OSError as error:
            raise UserError(f"{stored.file} cannot be read: {error.strerror or error}.") from None
        return torch.frombuffer(place, dtype=dtype).view(shape) if place else torch.empty(shape, dtype=dtype)

    def _file(self, path: Path) -> int:
        """Descriptor of a file, which stays open."""
        if path not in self._open:
            self._open[path] = self._stack.enter_context(path.open("rb", buffering=0)).fileno()
        return self._open[path]

    def read_chunks(
        self, name: str, rows: slice, columns: slice, chunk_bytes: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Read a part of a matrix in chunks of rows.

        Args:
            name: Of the tensor.
            rows, columns: The part.
            chunk_bytes: The most that a chunk takes in fp64.

        Yields:
            Number of rows before the chunk, and the chunk.
        """
        step = max(1, chunk_bytes // (max(1, self.tensors[name].shape[1]) * 8))
        for start in range(rows.start, rows.stop, step):
            yield start - rows.start, self.read(name, slice(start, min(start + step, rows.stop)), columns)


class NoWeights:
    """Takes the place of a `Checkpoint` where there is only a config.json: reads nothing, parameters stay undefined."""

    def __enter__(self) -> NoWeights:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        """A zero that broadcasts."""
        return torch.zeros(())

    def read_chunks(
        self, name: str, rows: slice, columns: slice, chunk_bytes: int
    ) -> Iterator[tuple[int, Tensor]]:
        """No chunks."""
        return iter(())


def _split(place: bytearray, rows: int) -> Iterator[memoryview]:
    """The rows of a matrix in `place`."""
    view, size = memoryview(place), len(place) // max(1, rows)
    return (view[row * size : (row + 1) * size] for row in range(rows))


def _read_all(file: int, place: bytearray | memoryview, start: int) -> None:
    """Fill `place` with the bytes of a file from `start` on."""
    view = memoryview(place)
    while view:
        count = os.preadv(file, [view], start)
        if not count:
            raise OSError("it ends too early")
        view, start = view[count:], start + count
