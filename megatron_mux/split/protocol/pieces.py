"""Parts of a task's adapter and optimizer as tensors with an index, as they travel and are stored.

A piece says where in the whole tensor its values belong, so that the client joins its own and the server's to the
adapter that a run on one machine would have saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import FailFast, Field, TypeAdapter, ValidationError
from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.split.protocol.agreement import Count, Fields

Kind = Literal["value", "exp_avg", "exp_avg_sq", "extra"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
"""States of optimizers; an optimizer may have none of them, or the first alone."""
KINDS: tuple[Kind, ...] = ("value", *MOMENTS, "extra")
DtypeName = Literal["f64", "f32", "bf16", "f16", "u8", "bool"]
DTYPES: dict[DtypeName, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "u8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MESSAGE_BYTES = 64 << 20
"""Of the tensors of one message with a part of a state; a larger piece travels alone."""
_MESSAGE_JSON = 512 << 10
"""Of its index, about: half of what a message may have."""


@dataclass(frozen=True)
class Piece:
    """A part of one tensor of a task's state.

    Attributes:
        key: Of the tensor, as in `adapter_model.safetensors`.
        kind: The parameter's value, a moment of its optimizer, or what its adapter keeps besides.
        shape: Of the whole tensor.
        tensor: The values, on the CPU.
        dim: The dimension of which this is a part; None: it is the whole tensor.
        runs: First and one past the last index along `dim` of each run of consecutive indices.
    """

    key: str
    kind: Kind
    shape: tuple[int, ...]
    tensor: Tensor
    dim: int | None = None
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def index(self) -> Tensor | None:
        """`[n]` int64 indices along `dim`; None: all of them."""
        if self.dim is None:
            return None
        return torch.cat([torch.arange(first, last) for first, last in self.runs])


def runs_of(index: Tensor) -> tuple[tuple[int, int], ...]:
    """Runs of consecutive numbers of `[n]` int64 indices in their order, as first and one past the last."""
    values: list[int] = index.tolist()
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1] = (runs[-1][0], value + 1)
        else:
            runs.append((value, value + 1))
    return tuple(runs)


class PieceEntry(Fields):
    """A piece without its values."""

    key: Annotated[str, Field(max_length=512)]
    kind: Kind
    dtype: DtypeName | None = None
    """Of the values; None, in older files: the tensor beside it says so."""
    shape: Annotated[tuple[Count, ...], Field(max_length=4), FailFast()]
    dim: Annotated[int, Field(strict=True, ge=0, le=3)] | None = None
    runs: Annotated[tuple[tuple[Count, Count], ...], Field(max_length=65536), FailFast()] = ()

    @classmethod
    def of(cls, piece: Piece) -> PieceEntry:
        """The entry of a piece.

        Raises:
            KeyError: Its dtype has no name.
        """
        dtype = _NAMES[piece.tensor.dtype]
        return cls(
            key=piece.key, kind=piece.kind, dtype=dtype, shape=piece.shape, dim=piece.dim, runs=piece.runs
        )

    def piece(self, tensor: Tensor) -> Piece:
        """The piece with these values.

        Raises:
            UserError: They have another shape.
        """
        if tuple(tensor.shape) != self.local_shape:
            wanted, got = list(self.local_shape), list(tensor.shape)
            raise UserError(f"pieces: {self.key} ({self.kind}) must be {wanted}, got {got}")
        return self.with_values(tensor)

    def with_values(self, tensor: Tensor) -> Piece:
        """The piece with values that are known to have the `local_shape`."""
        return Piece(self.key, self.kind, self.shape, tensor, self.dim, self.runs)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the values.

        Raises:
            UserError: The runs do not lie within the tensor.
        """
        if self.dim is None:
            return self.shape
        size = self.shape[self.dim] if self.dim < len(self.shape) else -1
        edges = [0, *(edge for run in sorted(self.runs) for edge in run), size]
        if any(a > b for a, b in zip(edges, edges[1:], strict=False)):
            raise UserError(
                f"pieces: {self.key}: runs {list(self.runs)[:3]} do not lie within dimension {self.dim}"
            )
        local = list(self.shape)
        local[self.dim] = sum(last - first for first, last in self.runs)
        return tuple(local)


_INDEX = TypeAdapter(Annotated[list[PieceEntry], FailFast()])


def to_index(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """The index of pieces, for a file or other ranks.

    Raises:
        KeyError: A dtype has no name.
    """
    return [PieceEntry.of(piece).model_dump(mode="json") for piece in pieces]


def first_part(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces that one message carries, from the first on; at least one if there are any."""
    part, size, text = list[Piece](), 0, 0
    for piece in pieces:
        size += piece.tensor.nbytes
        text += 256 + len(piece.key) + 24 * len(piece.runs)
        if part and (size > _MESSAGE_BYTES or text > _MESSAGE_JSON):
            break
        part.append(piece)
    return part


def from_index(index: Any, tensors: Sequence[Tensor]) -> list[Piece]:
    """The pieces of `to_index`, from their tensors.

    Raises:
        UserError: The index is malformed, or does not fit the tensors.
    """
    try:
        entries = _INDEX.validate_python(index)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"pieces: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if len(entries) != len(tensors):
        raise UserError(f"pieces: {len(entries)} are named, but there are {len(tensors)} tensors")
    return [entry.piece(tensor) for entry, tensor in zip(entries, tensors, strict=True)]


def check_pieces(pieces: Iterable[Piece], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare pieces with an adapter before whole tensors are allocated for them.

    Args:
        pieces: What another process has sent.
        shapes: Of the adapter's tensors, by key.

    Raises:
        UserError: A piece is of another tensor.
    """
    for piece in pieces:
        wanted = shapes.get(piece.key)
        if wanted is None or tuple(wanted) != piece.shape:
            needs = "does not have it" if wanted is None else f"needs {list(wanted)}"
            raise UserError(f"pieces: {piece.key} of shape {list(piece.shape)}: the adapter {needs}")


def assemble(pieces: Sequence[Piece], kind: Kind) -> dict[str, Tensor]:
    """Whole tensors of one kind by key; elements that no piece has are zero."""
    full: dict[str, Tensor] = {}
    for piece in pieces:
        if piece.kind != kind:
            continue
        index = piece.index
        if index is None or piece.dim is None:
            full[piece.key] = piece.tensor
            continue
        if piece.key not in full:
            full[piece.key] = torch.zeros(piece.shape, dtype=piece.tensor.dtype)
        full[piece.key].index_copy_(piece.dim, index, piece.tensor.to(full[piece.key].dtype))
    return full
