"""Kernels that dequantise, compiled for GPUs that are not here: registers, wide accesses, no fused multiply-adds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_mux.kernels.dequantise.triton import (
    EIGHT_BIT_WARPS,
    GROUPS,
    HOW,
    NF4_WARPS,
    eight_bit_kernel,
    nf4_kernel,
)

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
    constants = {**chosen, "GROUPS": GROUPS}
    warps = NF4_WARPS if kernel is nf4_kernel else EIGHT_BIT_WARPS
    signature, attributes = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        signature[name] = "constexpr" if name in constants else TYPES.get(name, "i32")
        if name not in constants and not parameter.do_not_specialize_on_alignment:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, **HOW})
    cubin, ptx = tmp_path / "kernel.cubin", binary.asm["ptx"]
    cubin.write_bytes(binary.asm["cubin"])
    dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found and int(found[1]) <= 64 and int(found[2]) == 0, usage
    # A thread stores what it has loaded: 16 bytes at a time, and nothing goes through shared memory.
    assert binary.metadata.shared == 0
    each = GROUPS // (32 * warps)
    assert len(re.findall(r"st\.global\.v4", ptx)) == len(re.findall(r"st\.global", ptx)) == each
    assert len(re.findall(r"ld\.global\.v2\.b32", ptx)) == each * (kernel is eight_bit_kernel)
    assert "fma" not in ptx and "ftz" not in ptx, "not bit-equal to separate operators"
