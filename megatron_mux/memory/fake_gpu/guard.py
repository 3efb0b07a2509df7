"""Makes autograd accept a CUDA device on a machine without one, without compiling anything.

Of all that fake tensors reach, only autograd's engine asks for two things:

- a *device guard* for the current device and stream, and for events. A CPU build has none, and the one that torch's own
  fake mode gives a CUDA build without a driver refuses events. torch lets Python register a guard that does nothing for
  the device type `PrivateUse1`; its address is entered for CUDA as well.
- whether torch *was built* for an accelerator and has initialized it: two virtual functions of its CUDA hooks. The
  hooks get a copy of their function table in which these two return true and false.

Both are undone on leaving. Each time, the result is checked.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_mux.memory.worker import WorkerError

# `c10::impl::device_guard_impl_registry`: the address of the guard of each `c10::DeviceType`.
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _FREE, _TYPES = 1, 20, 21

# `at::detail::getCUDAHooks()`. Its object's table: two words, two destructors, then as in `AcceleratorHooksInterface`.
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_WORDS, _IS_BUILT, _HAS_CONTEXT = 130, 4, 6
_FIRST = 2 * ctypes.sizeof(ctypes.c_void_p)


class NoFakeGpu(WorkerError):
    """This torch or this process cannot simulate a GPU; the message says why."""


@contextlib.contextmanager
def fake_guard() -> Iterator[None]:
    """Inside, autograd accepts CUDA tensors, which have to be fake.

    Raises:
        NoFakeGpu: There is a real GPU (hide it: `CUDA_VISIBLE_DEVICES=`), or this version of torch is not supported.
    """
    if torch.cuda.is_available():
        raise NoFakeGpu(
            "a GPU is visible to this process: set CUDA_VISIBLE_DEVICES to nothing before torch is imported"
        )
    try:
        guards = (ctypes.c_void_p * _TYPES).in_dll(_library("c10"), _GUARDS)
        _register()
        before, guards[_CUDA] = guards[_CUDA], guards[_FREE]
    except (AttributeError, OSError, ValueError) as error:
        raise NoFakeGpu(f"torch {torch.__version__} cannot simulate a GPU here: {error}") from error
    try:
        with _built_for_cuda():
            yield
    finally:
        guards[_CUDA] = before


@contextlib.contextmanager
def _built_for_cuda() -> Iterator[None]:
    """Inside, torch reports that it was built for CUDA and has not initialized it."""
    try:
        hooks = _library("torch_cpu")[_HOOKS]
    except (AttributeError, OSError) as error:
        raise NoFakeGpu(f"torch {torch.__version__} cannot simulate a GPU here: {error}") from error
    hooks.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(hooks())  # the object's first word
    before = table.value
    assert before is not None
    words = (ctypes.c_void_p * _WORDS).from_address(before - _FIRST)
    ours = (ctypes.c_void_p * _WORDS)(*words)
    ours[_IS_BUILT] = ctypes.cast(_YES, ctypes.c_void_p)
    ours[_HAS_CONTEXT] = ctypes.cast(_NO, ctypes.c_void_p)
    table.value = ctypes.addressof(ours) + _FIRST
    try:
        if _accelerator() != "cuda":
            raise NoFakeGpu(f"torch {torch.__version__} has an unknown table of CUDA hooks")
        yield
    finally:
        table.value = before


_YES = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: True)
_NO = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda *_: False)
_registered: list[Any] = []


def _register() -> None:
    """Register the guard that does nothing, once for each process."""
    if _registered:
        return
    kinds = torch._C._acc

    class Guard(kinds.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    guard = Guard()
    if not kinds.register_python_privateuseone_device_guard(guard):
        raise NoFakeGpu("this process has a device of another kind registered with torch")
    _registered.append(guard)


def _accelerator() -> str | None:
    """The type of the accelerator that torch was built for."""
    found = torch._C._accelerator_getAccelerator()
    return None if found is None else found.type


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.so"))
