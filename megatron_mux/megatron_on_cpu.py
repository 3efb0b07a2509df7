"""Runs Megatron's own training loop on the CPU, by replacing what it calls of `torch.cuda`.

This is for tests, and for trying the pipeline plug-in without a GPU. Megatron's loop asserts that there is a GPU,
allocates on `"cuda"`, keeps a generator per device and reads memory statistics; `use_cpu` replaces these calls. Its
fused kernels remain: `FLAGS` turns them off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

FLAGS = (
    "--distributed-backend gloo --use-cpu-initialization --transformer-impl local --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--no-gradient-accumulation-fusion --disable-gloo-process-groups --clip-grad 0"
).split()
"""Flags for Megatron on the CPU. Its gradient clipping accepts CUDA tensors only."""

_CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """A mode in which calls of torch with a CUDA device use the CPU instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {name: _moved(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **named)


def _moved(device: Any) -> Any:
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    return _CPU if is_cuda or (isinstance(device, str) and device.startswith("cuda")) else device


class _Stream:
    """A stand-in for a CUDA stream, on which all work is already done; a class, for annotations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what `torch.cuda.Stream` takes."""

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def is_capturing(self) -> bool:
        """Return False: there are no CUDA graphs."""
        return False


_FOR_MEGATRON: Mapping[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "get_device_properties": lambda device=None: SimpleNamespace(major=10),  # a GPU without extra settings
}
"""What Megatron alone is told: other packages decide by these calls, often when imported, what to do with a GPU."""

_FOR_ALL: Mapping[str, Callable[..., Any]] = {
    "current_device": lambda: _CPU,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "Stream": _Stream,
    "current_stream": lambda device=None: _Stream(),
    "stream": lambda stream: nullcontext(),
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
}


def use_cpu() -> None:
    """Let Megatron compute on the CPU in this process from now on; packages may be imported before or after.

    Harmless if called again. Nothing undoes it.
    """
    if any(isinstance(mode, OnCpu) for mode in _get_current_function_mode_stack()):
        return
    from megatron.core.tensor_parallel import random
    from torch import _dynamo

    _dynamo.config.disable = True  # it would use the device's streams
    for name, replacement in _FOR_MEGATRON.items():
        setattr(torch.cuda, name, _for_megatron(replacement, getattr(torch.cuda, name)))
    for name, replacement in _FOR_ALL.items():
        setattr(torch.cuda, name, replacement)
    torch.accelerator.current_stream = lambda device=None: _Stream()  # type: ignore[assignment,return-value]
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    OnCpu().__enter__()  # type: ignore[no-untyped-call]


def _for_megatron(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the replacement if one of Megatron's modules calls it, else the original."""

    def called(*args: Any, **kwargs: Any) -> Any:
        name = str(sys._getframe(1).f_globals.get("__name__"))
        return (replacement if name.partition(".")[0] == "megatron" else original)(*args, **kwargs)

    return called
