"""Triton generates a launcher for each kernel from its source: it is made here, since compiling a kernel needs none."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import megatron_mux

assert not triton.knobs.runtime.interpret

pytestmark = pytest.mark.versions  # of Triton, too

_OF_LAUNCHES = {
    name
    for name, parameter in inspect.signature(JITFunction.run).parameters.items()
    if parameter.kind == inspect.Parameter.KEYWORD_ONLY
}


def kernels() -> Iterator[Any]:
    """All functions of the package that Triton compiles, whether they are launched or called by others."""
    root = Path(megatron_mux.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "@triton.jit" in path.read_text():
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            for value in vars(importlib.import_module(name)).values():
                if isinstance(value, JITFunction) and value.fn.__module__ == name:
                    yield value


def bind(kernel: Any) -> None:
    """Make the launcher's function that takes a kernel's arguments, and call it."""
    names = list(kernel.signature.parameters)
    assert not _OF_LAUNCHES.intersection(names), "a launch has arguments of these names itself"
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = dict(zip(names, [torch.zeros(16)] + [16] * (len(names) - 1), strict=True))
    bound, specialization, left = binder(**given, num_warps=4, debug=False)
    assert list(bound.values()) == list(given.values()) and len(specialization) == len(names)
    assert left == {"num_warps": 4, "debug": False}


@pytest.mark.parametrize("kernel", [pytest.param(kernel, id=kernel.__qualname__) for kernel in kernels()])
def test_launchers(kernel: Any) -> None:
    bind(kernel)


def test_launched_kernels_are_found() -> None:
    names = {kernel.__name__ for kernel in kernels()}
    assert {"up_kernel", "_update", "scale_kernel", "weight_gradient_kernel"} <= names
