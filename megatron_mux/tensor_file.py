"""Writes safetensors files piece by piece, durably.

`safetensors` itself copies everything first and writes it in one call, during which no other thread may run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_mux.files import Pace, write

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names in the format of safetensors of what backbones, adapters and optimizers keep."""


class TensorInfo(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], pace: Pace | None = None
) -> None:
    """Write a safetensors file and flush it to disk.

    Args:
        path: The file.
        tensors: By name, on the CPU.
        metadata: Further entries of the header.
        pace: How fast to write.

    Raises:
        KeyError: A tensor's dtype has no name.
        OSError: The disk is full or not writable.
    """
    infos = {key: TensorInfo(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    pieces = (bytes_of(tensors[key]) for key in in_file_order(infos))
    write(path, *header(infos, metadata), *pieces, pace=pace)


def in_file_order(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Names in the order of their data: the widest values first, as in the library, so that each is aligned."""
    return sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))


def header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, bytes]:
    """What a file begins with, before the data of the tensors in the order of `in_file_order`.

    Raises:
        KeyError: A tensor's dtype has no name.
    """
    content: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for key in in_file_order(tensors):
        start, end = end, end + tensors[key].nbytes
        content[key] = {
            "dtype": _DTYPES[tensors[key].dtype],
            "shape": list(tensors[key].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little"), text


def bytes_of(tensor: Tensor) -> memoryview:
    """The data of a tensor on the CPU."""
    data: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return data
