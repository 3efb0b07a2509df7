"""Launches of Triton kernels: what was compiled serves arguments that Triton compiles alike, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from megatron_mux.kernels import triton_launch
from megatron_mux.kernels.triton_launch import launch


@triton.jit  # type: ignore[untyped-decorator]
def kernel(values, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Never runs here."""
    tl.store(values + tl.arange(0, SIZE), count)


class Compiling:
    """Stands in for a kernel: notes what is compiled, and what is launched as compiled."""

    arg_names = ("values", "count", "SIZE")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*arguments: Any, **constants: Any) -> Launched:
            self.compiled.append(arguments)
            return Launched(self)

        return compile_and_launch


class Launched:
    """Stands in for a compiled kernel."""

    def __init__(self, kernel: Compiling) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self._kernel.launched.append((grid, *arguments))


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_launch, "_compiled", {})
    yield


def specialised(values: Tensor | None, count: float | None) -> str:
    """What Triton compiles the kernel for, given these arguments."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return str(bind(values, count, SIZE=16)[1])


ROWS = torch.zeros(64)
COUNTS = (-16, 1, 2, 15, 16, 17, 32, (1 << 31) - 16, 1 << 31, (1 << 31) + 1, 1 << 33, 1.0, 0.5, None)
VALUES = (ROWS, ROWS[4:], ROWS[1:], ROWS[3:], ROWS.double(), ROWS.bfloat16(), None)


def test_arguments_share_what_triton_compiles_alike() -> None:
    fake = Compiling()
    of: dict[str, int] = {}
    for values in VALUES:
        for count in COUNTS:
            before = len(fake.compiled)
            launch(fake, (2,), (values, count), {"SIZE": 16, "num_warps": 4})
            if len(fake.compiled) > before:
                of.setdefault(specialised(values, count), len(of))
            else:
                # Served by something compiled before: for arguments that Triton does not tell from these.
                assert specialised(values, count) in of
                assert fake.launched[-1] == ((2, 1, 1), values, count, 16)
    assert fake.launched and len(fake.compiled) == len(of)


def test_constants_are_part_of_it() -> None:
    fake = Compiling()
    for size, warps in ((16, 4), (32, 4), (16, 8), (16, 4)):
        launch(fake, (2, 3), (ROWS, 5), {"SIZE": size, "num_warps": warps})
    assert len(fake.compiled) == 3 and [call[0] for call in fake.launched] == [(2, 3, 1)]
