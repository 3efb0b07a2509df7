"""Tensors as bytes: hidden states `[T, H]` in a wire dtype, and the named tensors of an adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_mux.split.protocol.wire import Dtype, Limits, WireError

Bytes = npt.NDArray[np.uint8]

_TORCH = {
    Dtype.F32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.F16: torch.float16,
    Dtype.F64: torch.float64,
}
_NAMES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "bool": torch.bool,
}
"""Dtypes of named tensors, by their names in the index."""
_NAME_OF = {dtype: name for name, dtype in _NAMES.items()}

_LARGEST_INT8 = 127
_SCALE_BYTES = 4
_MOST_DIMENSIONS = 8
_MOST_VALUES = 1 << 40


def encode(tensor: Tensor, dtype: Dtype) -> memoryview:
    """The bytes of a tensor `[T, H]`, without a copy if it has the wire dtype and is contiguous in host memory.

    Args:
        tensor: `[T, H]`, of a floating-point dtype. Values beyond the range of FP16 become infinite.
        dtype: Wire dtype.
    """
    if dtype is Dtype.I8:
        return _encode_int8(tensor.detach().to("cpu", torch.float32))
    return _bytes_of(tensor.detach().to("cpu", _TORCH[dtype]))


def decode(content: Bytes, rows: int, width: int, dtype: Dtype, limits: Limits) -> Tensor:
    """The tensor `[T, H]` of some bytes: a view of them, or float32 for I8.

    Args:
        content: The bytes, as many as T, H and the wire dtype make.
        rows: T.
        width: H.
        dtype: Wire dtype.
        limits: Whose checks of values to make.

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


def encode_named(tensors: Mapping[str, Tensor]) -> tuple[list[list[Any]], list[memoryview]]:
    """The index of named tensors, and the bytes of each.

    Returns:
        `[name, dtype, shape]` of each tensor, and their bytes in the same order.

    Raises:
        KeyError: A dtype that the index has no name for.
    """
    index = [[name, _NAME_OF[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
    return index, [_bytes_of(tensor.detach().to("cpu")) for tensor in tensors.values()]


def decode_named(index: object, content: Bytes, limits: Limits) -> dict[str, Tensor]:
    """The named tensors of an index and their bytes; copies, each aligned.

    Args:
        index: What the message's JSON has.
        content: The bytes of all tensors, one after the other.
        limits: Whose checks of values to make.

    Raises:
        WireError: The index is malformed or does not describe these bytes, or a value is not finite.
    """
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, dtype, shape in _entries(index):
        end = start + math.prod(shape) * dtype.itemsize
        if name in tensors or end > len(content):
            raise WireError("index", f"{name!r} is in the index twice, or does not fit the bytes sent.")
        tensor = tensors[name] = torch.empty(shape, dtype=dtype)
        # Any other byte than 0 and 1 is no bool to torch: bools are converted.
        target = tensor.view(-1) if dtype is torch.bool else tensor.view(-1).view(torch.uint8)
        target.copy_(torch.from_numpy(content[start:end]))
        if limits.finite and dtype.is_floating_point:
            _check_finite(repr(name), tensor)
        start = end
    if start != len(content):
        raise WireError(
            "index", f"The index describes {start} bytes of tensors, but {len(content)} were sent."
        )
    return tensors


def _entries(index: object) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    if not isinstance(index, list):
        raise WireError("index", "The index of tensors must be a list of [name, dtype, shape].")
    for entry in index:
        match entry:
            case [str(name), str(dtype), list(shape)] if (
                dtype in _NAMES
                and len(shape) <= _MOST_DIMENSIONS
                and all(type(size) is int and size >= 0 for size in shape)
                and math.prod(size or 1 for size in shape) < _MOST_VALUES
            ):
                yield name, _NAMES[dtype], shape
            case _:
                raise WireError("index", f"{str(entry)[:80]} is not [name, dtype, shape] of a tensor.")


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
