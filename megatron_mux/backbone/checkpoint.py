"""The safetensors of a Hugging Face directory: their headers, checked, and any part of a tensor on demand."""

from __future__ import annotations

import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.files import read_json
from megatron_mux.hub_cache import hint_to_download

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
_READABLE = _DTYPES | _QUANTISED_DTYPES
_SAMPLES, _SAMPLE_BYTES = 512, 4096
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

    Raises:
        UserError: There are no safetensors, or a file is unreadable, truncated or damaged.

    Attributes:
        tensors: By name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
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
        """Fill `tensors`."""
        for file in self._files():
            self._read_header(file)

    def _files(self) -> list[Path]:
        """The files that `transformers` reads: a single one comes before an index, which may be of an older model."""
        single, index = self.path / _SINGLE, self.path / _INDEX
        if single.is_file():
            return [single]
        if index.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise UserError(f"{index} has no weight_map.")
            files = [self.path / name for name in sorted(set(names.values()))]
            if missing := [file.name for file in files if not file.is_file()]:
                raise UserError(
                    f"{index} names {missing[0]}, which is not there: complete the directory, or remove the index "
                    "if it is of another model."
                )
            return files
        files = sorted(
            f
            for f in self.path.glob("*.safetensors")
            if not f.name.startswith(("adapter_model", "consolidated"))
        )
        if not files:
            others = sorted(f.name for f in self.path.glob("*.bin"))
            hint = (
                f" It has {others[0]}: save the model again as safetensors."
                if others
                else hint_to_download(self.path)
            )
            raise UserError(f"{self.path} holds no *.safetensors.{hint}")
        return files

    def _read_header(self, file: Path) -> None:
        try:
            size = file.stat().st_size
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                    raise ValueError("its header is cut or damaged")
                entries = json.loads(stream.read(length))
            self._add(file, entries, 8 + length, size)
        except OSError as error:
            hint = hint_to_download(self.path)
            raise UserError(f"{file} cannot be read: {error.strerror or error}.{hint}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is not a complete safetensors file: {error}.") from None

    def _add(self, file: Path, entries: dict[str, Any], data: int, size: int) -> None:
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if data + end != size:
            raise ValueError(f"its tensors take {end} bytes, but it has {size - data}")
        for name, entry in entries.items():
            if name in self.tensors:
                raise UserError(
                    f"{file} and {self.tensors[name].file} both hold {name}: one is a leftover copy: remove it, or "
                    f"name the files to read in {_INDEX}."
                )
            start, stop = entry["data_offsets"]
            stored = Stored(file, entry["dtype"], tuple(entry["shape"]), data + start)
            known = _READABLE.get(stored.dtype)
            if known is not None and stop - start != math.prod(stored.shape) * known.itemsize:
                raise ValueError(f"{name} of shape {list(stored.shape)} takes {stop - start} bytes")
            self.tensors[name] = stored

    def digest(self, names: Mapping[str, str]) -> str:
        """SHA-256 over dtypes, shapes and samples of tensors, however they are divided among files.

        Args:
            names: For a name of each tensor, by which they are ordered, that under which it is stored.
        """
        found, ends = hashlib.sha256(), [0]
        ordered = sorted(names)
        for name in ordered:
            stored = self.tensors[names[name]]
            found.update(json.dumps([name, stored.dtype, stored.shape]).encode())
            ends.append(ends[-1] + math.prod(stored.shape) * _READABLE[stored.dtype].itemsize)
        # Bytes are sampled as if the tensors lay end to end.
        for place in range(0, ends[-1], max(1, ends[-1] // _SAMPLES)):
            number = bisect_right(ends, place) - 1
            size = min(_SAMPLE_BYTES, ends[number + 1] - place)
            found.update(self._bytes(names[ordered[number]], place - ends[number], size))
        for number, name in enumerate(ordered):  # norms and biases may lie between two samples
            if (size := ends[number + 1] - ends[number]) <= 4 * _SAMPLE_BYTES:
                found.update(self._bytes(names[name], 0, size))
        return found.hexdigest()

    def _bytes(self, name: str, start: int, size: int) -> bytes | bytearray:
        """Bytes of a tensor's content, from `start` on."""
        sample, stored = bytearray(size), self.tensors[name]
        self._read_into(stored.file, sample, stored.start + start)
        return sample

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype, which `check_dtype` accepts."""
        return _DTYPES[self.tensors[name].dtype]

    def check_dtype(self, name: str, supported: Collection[str] = ()) -> str | None:
        """The problem with a tensor's dtype; None if it is supported.

        Args:
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
        for row, piece in enumerate(pieces):
            self._read_into(stored.file, piece, start + row * width * dtype.itemsize)
        return torch.frombuffer(place, dtype=dtype).view(shape) if place else torch.empty(shape, dtype=dtype)

    def _read_into(self, path: Path, place: bytearray | memoryview, start: int) -> None:
        """Fill `place` with the bytes of a file from `start` on."""
        try:
            _read_all(self._file(path), place, start)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None

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
