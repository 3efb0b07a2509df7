"""A `torch_dist` directory read as if it were the Hugging Face directory of the same model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_mux.backbone.checkpoint import Checkpoint, Stored
from megatron_mux.backbone.resolve import expected
from megatron_mux.backbone.torch_dist.locate import locate
from megatron_mux.backbone.torch_dist.mapping import TensorSource, places
from megatron_mux.backbone.torch_dist.storage import DTYPES, Chunk, GlobalTensor, read_contents
from megatron_mux.errors import UserError
from megatron_mux.shape import BackboneShape

_TORCH = {name: dtype for dtype, name in DTYPES.items()}
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""May have more rows than there are tokens: Megatron pads them."""


class _Source(NamedTuple):
    """Where a Hugging Face tensor comes from: a part of one of Megatron's, the leading indices of it."""

    place: TensorSource
    key: str
    tensor: GlobalTensor
    leading: tuple[int, ...]


class TorchDistCheckpoint(Checkpoint):
    """The tensors of a Megatron checkpoint by their Hugging Face names, read part by part.

    Args:
        path: What Megatron calls `--save`, or the directory of an iteration.

    Raises:
        UserError: It is in another format, damaged, or does not hold the tensors of the shape.
    """

    def __init__(self, path: Path, shape: BackboneShape) -> None:
        self._shape, self._directory = shape, locate(path)
        self._sources: dict[str, _Source] = {}
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}
        self._stored: dict[Chunk, Stored] = {}
        super().__init__(path)

    def _read_headers(self) -> None:
        contents = read_contents(self._directory)
        missing = []
        for name, place in places(self._shape).items():
            held = next((each for each in place.keys if each[0] in contents.tensors), None)
            if held is None:
                missing.append(f"{place.keys[0][0]} ({name})")
            else:
                self._sources[name] = _Source(place, held[0], contents.tensors[held[0]], held[1])
        if missing:
            raise UserError(
                f"{self._directory} lacks {missing[0]} and {len(missing) - 1} more, which a {self._shape.family} has."
                if len(missing) > 1
                else f"{self._directory} lacks {missing[0]}, which a {self._shape.family} has."
            )
        shapes = expected(self._shape)
        for name, source in self._sources.items():
            self._check(source, shapes[name])
            self.tensors[name] = Stored(self._directory, source.tensor.dtype, shapes[name], 0)
        used = {key for source in self._sources.values() for key, _ in source.place.keys}
        for key in contents.tensors.keys() - used:
            if not key.endswith("inv_freq"):
                self.tensors[key] = Stored(
                    self._directory, contents.tensors[key].dtype, contents.tensors[key].shape, 0
                )

    def _bytes(self, name: str, start: int, size: int) -> bytes:
        """See `Checkpoint._bytes`: of the tensor as a Hugging Face directory would store it."""
        shape = self.tensors[name].shape
        width = math.prod(shape[1:]) * _TORCH[self.tensors[name].dtype].itemsize
        first, last = start // width, -(-(start + size) // width)
        content = self.read(name, slice(first, last)).flatten().view(torch.uint8)
        return bytes(content[start - first * width :][:size].numpy())

    def _check(self, source: _Source, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape than the model's."""
        place = source.place
        wanted = (place.rows, *(shape[:1] if place.transposed else shape[1:]))
        held = source.tensor.shape[len(source.leading) :]
        if len(held) == len(wanted) and place.names[0] in _VOCABULARY and held[0] >= wanted[0]:
            held = (wanted[0], *held[1:])
        if held != wanted or any(i >= n for i, n in zip(source.leading, source.tensor.shape, strict=False)):
            lead = tuple(source.tensor.shape[: len(source.leading)])
            raise UserError(
                f"{self._directory} holds {source.key} of shape {list(source.tensor.shape)}, but the model's arguments "
                f"ask for {[*lead, *wanted]}."
            )

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        """See `Checkpoint.read`."""
        source, shape = self._sources[name], self.tensors[name].shape
        first, last, _ = rows.indices(shape[0])
        if len(shape) == 1:
            return self._part(source, range(first, last), range(1)).flatten()
        left, right, _ = (columns or slice(None)).indices(shape[1])
        if source.place.transposed:
            return self._part(source, range(left, right), range(first, last)).t().contiguous()
        return self._part(source, range(first, last), range(left, right))

    def _part(self, source: _Source, rows: range, columns: range) -> Tensor:
        """Rows of the Hugging Face tensor as it would be stored `[out, in]`."""
        value = torch.empty(len(rows), len(columns), dtype=_TORCH[source.tensor.dtype])
        filled = 0
        for theirs, ours, count in source.place.runs:
            start, stop = max(ours, rows.start), min(ours + count, rows.stop)
            if start < stop:
                target = value[start - rows.start : stop - rows.start]
                filled += self._fill(target, source, theirs + start - ours, columns.start)
        if filled != value.numel():
            raise UserError(f"{self._directory} lacks a part of {source.key}: copy it whole.")
        return value

    def _fill(self, target: Tensor, source: _Source, row: int, column: int) -> int:
        """Copy rows and columns of one of Megatron's tensors, from these first ones on; returns how many values."""
        leading, filled = len(source.leading), 0
        key = source.key, leading
        if key not in self._chunks:
            self._chunks[key] = source.tensor.by_index(leading)
        for chunk in self._chunks[key].get(source.leading, []):
            stored = self._matrix(chunk, source.tensor.dtype, source.leading)
            offsets = (*chunk.offsets[leading:], 0)[:2]
            top, left = max(row, offsets[0]), max(column, offsets[1])
            bottom = min(row + target.shape[0], offsets[0] + stored.shape[0])
            right = min(column + target.shape[1], offsets[1] + stored.shape[1])
            if top < bottom and left < right:
                part = self._read(
                    stored,
                    slice(top - offsets[0], bottom - offsets[0]),
                    slice(left - offsets[1], right - offsets[1]),
                )
                target[top - row : bottom - row, left - column : right - column].copy_(part)
                filled += part.numel()
        return filled

    def _matrix(self, chunk: Chunk, dtype: str, index: tuple[int, ...]) -> Stored:
        """The matrix (of one column, if it is a vector) that a chunk holds of a layer and an expert."""
        if chunk not in self._stored:
            self._stored[chunk] = chunk.stored(dtype)
        whole, leading = self._stored[chunk], len(index)
        rows, columns = (*chunk.shape[leading:], 1)[:2]
        before = 0
        for i, offset, count in zip(index, chunk.offsets, chunk.shape, strict=False):
            before = before * count + i - offset
        start = whole.start + before * rows * columns * _TORCH[dtype].itemsize
        return Stored(whole.file, dtype, (rows, columns), start)
