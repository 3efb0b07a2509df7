"""Kernels that dequantise, compiled for GPUs that are not here: registers, wide accesses, no fused multiply-adds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl

from megatron_mux.kernels.dequantise.triton import (
    EIGHT_BIT_WARPS,
    GROUPS,
    HOW,
    NF4_WARPS,
    eight_bit_kernel,
    nf4_kernel,
)
from tests.unit.kernels.compiling import compile_for

TYPES = {
    "place": "*bf16", "packed": "*i32", "absmax": "*u8", "codebook": "*fp32", "first": "*i32", "scales": "*fp32",
    "offsets": "*fp32", "nested_codebook": "*fp32", "counts": "*i64", "codes": "*i8",
}  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "nf4, double": (nf4_kernel, {"counts": None, "ROUNDED": tl.float32}),
    "nf4 of experts": (nf4_kernel, {"ROUNDED": tl.bfloat16}),
    "int8 by blocks": (eight_bit_kernel, {"counts": None, "FLOATING": False, "WIDTH": 8}),
    "fp8 by rows": (eight_bit_kernel, {"counts": None, "FLOATING": True, "WIDTH": 8, "blocks": 1}),
    "fp8 of experts": (eight_bit_kernel, {"FLOATING": True, "WIDTH": 8}),
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_resources(case: str, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, chosen = CASES[case]
    warps = NF4_WARPS if kernel is nf4_kernel else EIGHT_BIT_WARPS
    constants, options = {**chosen, "GROUPS": GROUPS}, {"num_warps": warps, **HOW}
    found = compile_for(arch, kernel, TYPES, constants, options, tmp_path)
    assert found.registers <= 64 and found.stack == 0
    # A thread stores what it has loaded: 16 bytes at a time, and nothing goes through shared memory.
    assert found.shared == 0
    each = GROUPS // (32 * warps)
    assert len(re.findall(r"st\.global\.v4", found.ptx)) == len(re.findall(r"st\.global", found.ptx)) == each
    assert len(re.findall(r"ld\.global\.v2\.b32", found.ptx)) == each * (kernel is eight_bit_kernel)
    assert "fma" not in found.ptx and "ftz" not in found.ptx, "not bit-equal to separate operators"
