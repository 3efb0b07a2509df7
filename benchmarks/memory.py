"""How much memory a process uses: peaks as the system saw them, and what the tensors that live on add up to."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch
from torch import Tensor


def tensor_bytes() -> int:
    """Bytes of all storages that any tensor in this process holds, each counted once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and not found.is_meta:
            for tensor in (found, found.grad) if found.is_leaf else (found,):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def resident_bytes() -> int:
    """What this process occupies now, freed blocks given back first."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most this process has occupied, since its start or the last `reset_peak`.

    Not `ru_maxrss`, which a child process inherits from its parent.
    """
    return _status("VmHWM")


def reset_peak(device: torch.device) -> None:
    """Start a new peak from here."""
    resident_bytes()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def report(device: torch.device) -> dict[str, int]:
    """Peak since the last reset and what lives on, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return {
            "peak": torch.cuda.max_memory_allocated(device),
            "peak_reserved": torch.cuda.max_memory_reserved(device),
            "persistent": torch.cuda.memory_allocated(device),
        }
    peak = peak_resident_bytes()
    return {"peak": peak, "persistent": tensor_bytes(), "resident": resident_bytes()}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
