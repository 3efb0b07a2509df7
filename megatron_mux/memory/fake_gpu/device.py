"""Fake tensors on `cuda`, on a machine without a GPU.

Calls that would need a driver are replaced, and restored on leaving.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_mux.attributes import replaced
from megatron_mux.gpus import Gpu
from megatron_mux.memory.fake_gpu.attention import attention_of
from megatron_mux.memory.fake_gpu.fake_tensors import FakeTensors
from megatron_mux.memory.fake_gpu.guard import fake_guard

DEVICE = torch.device("cuda", 0)

# Operators that are decomposed if they have no CUDA kernel (from `native_functions.yaml`).
_WHOLE = ("silu_backward", "mish_backward", "_fused_rms_norm")


@contextlib.contextmanager
def fake_gpu(gpu: Gpu) -> Iterator[None]:
    """Inside, tensors are fake and `DEVICE` is such a GPU. The backward pass runs in the calling thread.

    Raises:
        NoFakeGpu: This process cannot simulate one: see `fake_guard`.
    """
    bf16 = gpu.capability >= (8, 0)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda *_, **__: bf16),
            (torch.cuda, "get_device_capability", lambda *_, **__: gpu.capability),
            (torch.nn.functional, "scaled_dot_product_attention", attention_of(gpu)),
        ):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(_whole_operators())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # Inputs that a model keeps outside its modules (peft's prefix tokens) are real.
        stack.enter_context(FakeTensors())
        stack.enter_context(fake_guard())
        yield


@contextlib.contextmanager
def _whole_operators() -> Iterator[None]:
    """Inside, a CPU build has CUDA kernels for operators that would be decomposed; fake tensors never reach them."""

    def unreached(*_: Any, **__: Any) -> None:
        raise RuntimeError("a CUDA kernel was called without a GPU")

    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in _WHOLE:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, unreached, "CUDA")
        yield
