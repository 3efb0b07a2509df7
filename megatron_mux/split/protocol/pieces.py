"""Parts of a task's adapter and optimizer as tensors with a JSON index, as they travel and are stored.

A piece says where in the whole tensor its values belong, so that the client joins its own and the server's to the
adapter that a run on one machine would have saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from megatron_mux.errors import UserError

Kind = Literal["value", "exp_avg", "exp_avg_sq", "extra"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
"""States of optimizers; an optimizer may have none of them, or the first alone."""
KINDS: tuple[Kind, ...] = ("value", *MOMENTS, "extra")

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


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    key: Annotated[str, Field(max_length=512)]
    kind: Kind
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...], Field(max_length=4)]
    dim: Annotated[int, Field(ge=0, le=3)] | None = None
    runs: Annotated[tuple[tuple[int, int], ...], Field(max_length=65536)] = ()


_INDEX = TypeAdapter(list[_Entry])


def to_wire(pieces: Iterable[Piece]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The JSON index of pieces, and their tensors by their number in it."""
    index, tensors = [], {}
    for i, piece in enumerate(pieces):
        entry = _Entry(key=piece.key, kind=piece.kind, shape=piece.shape, dim=piece.dim, runs=piece.runs)
        index.append(entry.model_dump(mode="json"))
        tensors[str(i)] = piece.tensor
    return index, tensors


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


def from_wire(index: Any, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """The pieces of an index that another process has written.

    Raises:
        UserError: The index is malformed, or does not fit the tensors.
    """
    try:
        entries = _INDEX.validate_python(index)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"pieces: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if len(entries) != len(tensors):
        raise UserError(f"pieces: {len(entries)} are named, but {len(tensors)} tensors were sent")
    pieces = []
    for i, entry in enumerate(entries):
        tensor = tensors.get(str(i))
        if tensor is None or tuple(tensor.shape) != _local_shape(entry):
            got = "nothing" if tensor is None else list(tensor.shape)
            raise UserError(
                f"pieces: {entry.key} ({entry.kind}) must be {list(_local_shape(entry))}, got {got}"
            )
        pieces.append(Piece(entry.key, entry.kind, entry.shape, tensor, entry.dim, entry.runs))
    return pieces


def _local_shape(entry: _Entry) -> tuple[int, ...]:
    if entry.dim is None:
        return entry.shape
    size = entry.shape[entry.dim] if entry.dim < len(entry.shape) else -1
    edges = [0, *(edge for run in sorted(entry.runs) for edge in run), size]
    if any(a > b for a, b in zip(edges, edges[1:], strict=False)):
        raise UserError(
            f"pieces: {entry.key}: runs {list(entry.runs)[:3]} do not lie within dimension {entry.dim}"
        )
    local = list(entry.shape)
    local[entry.dim] = sum(last - first for first, last in entry.runs)
    return tuple(local)


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
