"""Memory of this process: its peak as the operating system reports it, and the total of all live tensors."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

from torch import Tensor


def tensor_bytes() -> int:
    """Return the bytes of all tensor storages in this process, each counted once."""
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
    """Return the resident bytes of this process, after freed blocks are returned to the operating system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Return the highest resident size since the process started or since the last `reset_peak`, in bytes.

    `ru_maxrss` would not do: a child process inherits it from its parent.
    """
    return _status("VmHWM")


def reset_peak() -> None:
    """Start measuring a new peak."""
    resident_bytes()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def report() -> dict[str, int]:
    """Return the peak since the last `reset_peak` and the memory of live tensors, in bytes."""
    peak = peak_resident_bytes()
    return {"peak": peak, "persistent": tensor_bytes(), "resident": resident_bytes()}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
