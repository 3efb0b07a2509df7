"""Tensors as bytes: hidden states `[T, H]` in a wire dtype, and the pieces of an adapter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_mux.split.protocol.pieces import DTYPES, Piece, PieceEntry
from megatron_mux.split.protocol.wire import Dtype, Limits, WireError

Bytes = npt.NDArray[np.uint8]

_TORCH = {
    Dtype.F32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.F16: torch.float16,
    Dtype.F64: torch.float64,
}

_LARGEST_INT8 = 127
_SCALE_BYTES = 4
_MOST_VALUES = 1 << 40


def encode(tensor: Tensor, dtype: Dtype) -> memoryview:
    """The bytes of a tensor `[T, H]`, without a copy if it has the wire dtype and is contiguous in host memory.

    Args:
        tensor: `[T, H]`, of a floating-point dtype. Values beyond the range of FP16 become infinite.
    """
    if dtype is Dtype.I8:
        return _encode_int8(tensor.detach().to("cpu", torch.float32))
    return _bytes_of(tensor.detach().to("cpu", _TORCH[dtype]))


def decode(content: Bytes, rows: int, width: int, dtype: Dtype, limits: Limits) -> Tensor:
    """The tensor `[T, H]` of some bytes: a view of them, or float32 for I8.

    Args:
        content: The bytes, as many as T, H and the wire dtype make.

    Raises:
        WireError: A value is not finite, or a row's norm is too large.
    """
    raw = torch.from_numpy(content)
    if dtype is Dtype.I8:
        row = raw.view(rows, _SCALE_BYTES + width)
        scales = row[:, :_SCALE_BYTES].reshape(-1).view(torch.float32).view(rows, 1)
        tensor = row[:, _SCALE_BYTES:].view(torch.int8).to(torch.float32).mul_(scales)
    else:
        tensor = raw.view(_TORCH[dtype]).view(rows, width)
    if limits.finite:
        _check_finite("The tensor", tensor)
    if limits.norm is not None:
        wide = torch.float64 if dtype is Dtype.F64 else torch.float32
        norm = float(torch.linalg.vector_norm(tensor, dim=1, dtype=wide).max())
        if not norm <= limits.norm:
            raise WireError(
                "norm", f"A row of the tensor has norm {norm:.6g}; at most {limits.norm:.6g} is accepted."
            )
    return tensor


def encode_pieces(pieces: Sequence[Piece]) -> list[memoryview]:
    """The bytes of each piece's values, in their own dtype."""
    return [_bytes_of(piece.tensor.detach().to("cpu")) for piece in pieces]


def decode_pieces(index: Sequence[PieceEntry], content: Bytes, limits: Limits) -> list[Piece]:
    """The pieces of an index and their bytes; copies, each aligned.

    Args:
        index: What the message's JSON has.
        content: The bytes of all pieces, one after the other.

    Raises:
        WireError: The index does not describe these bytes, or a value is not finite.
        UserError: A piece does not lie within its tensor.
    """
    pieces: list[Piece] = []
    start = 0
    for entry in index:
        if entry.dtype is None:
            raise WireError("index", f"{entry.key!r} has no dtype.")
        dtype, shape = DTYPES[entry.dtype], entry.local_shape
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(content) or math.prod(size or 1 for size in shape) >= _MOST_VALUES:
            raise WireError("index", f"{entry.key!r} does not fit the bytes sent.")
        tensor = torch.empty(shape, dtype=dtype)
        # Any other byte than 0 and 1 is no bool to torch: bools are converted.
        target = tensor.view(-1) if dtype is torch.bool else tensor.view(-1).view(torch.uint8)
        target.copy_(torch.from_numpy(content[start:end]))
        if limits.finite and dtype.is_floating_point:
            _check_finite(repr(entry.key), tensor)
        pieces.append(entry.with_values(tensor))
        start = end
    if start != len(content):
        raise WireError(
            "index", f"The index describes {start} bytes of pieces, but {len(content)} were sent."
        )
    return pieces


def _encode_int8(tensor: Tensor) -> memoryview:
    scales = tensor.abs().amax(dim=1, keepdim=True) / _LARGEST_INT8
    values = tensor / torch.where(scales > 0, scales, 1.0)
    rows, width = tensor.shape
    content = torch.empty(rows, _SCALE_BYTES + width, dtype=torch.uint8)
    content[:, :_SCALE_BYTES] = scales.view(torch.uint8)
    # A row with a value that is not finite has such a scale: the receiver then finds the whole row not finite.
    values.round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8).nan_to_num_(0.0)
    content[:, _SCALE_BYTES:] = values.to(torch.int8).view(torch.uint8)
    return _bytes_of(content)


def _bytes_of(tensor: Tensor) -> memoryview:
    content: Bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return content.data


def _check_finite(name: str, tensor: Tensor) -> None:
    # The extremes are NaN if any value is; `isfinite` of all values takes twenty times as long.
    if tensor.numel() and not all(map(math.isfinite, map(float, torch.aminmax(tensor)))):
        raise WireError("finite", f"{name} has values that are not finite.")
