"""Writes safetensors files piece by piece, durably.

`safetensors` itself copies everything first and writes it in one call, during which no other thread may run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    pieces, end = [], 0
    # The widest values first, as in the library: so each is aligned.
    for key, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        start, end = end, end + tensor.nbytes
        header[key] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        pieces.append(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write(path, len(text).to_bytes(8, "little"), text, *pieces, pace=pace)
