"""Triton's element-wise kernels compiled for GPUs that are not here: no spills, and wide accesses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_mux.kernels.pointwise import triton as triton_pointwise
from megatron_mux.kernels.pointwise import triton_rotary

assert not triton.knobs.runtime.interpret

ABSENT = {"bias", "inner_weight", "inner_shift", "outer_shift", "key", "value"}
"""Pointers that are None where a case does not name them."""

_ACTIVATION = {"BLOCK": triton_pointwise.BLOCK, "num_warps": triton_pointwise.ACTIVATION_WARPS}
_HEADS = {
    "QUERIES": 4, "COUNT": 48, "PER_GROUP": 6, "KEYED": True, "SIZE": 128, "HALF": 64, "FIRST": 0,
    "INTERLEAVED": False, "HEADS": triton_rotary.ELEMENTS // 128, "NORMED": False, "HALVES": 64, "REST": 0, "RESTS": 1,
    "num_warps": triton_rotary.WARPS,
}  # fmt: skip
_NORMED = {**_HEADS, "HEADS": _HEADS["HEADS"] // 2, "NORMED": True}


def _sum(width: int, **constants: bool) -> dict[str, Any]:
    flags = {"BIASED": False, "ADDED": True, "STORED": True, "INNER": False, "OUTER": True, "CENTRED": False}
    block = triton.next_power_of_2(width)
    return {
        **flags,
        "SHIFTED": False,
        "BLOCK": block,
        "num_warps": triton_pointwise.norm_warps(width),
        **constants,
    }


CASES: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    **{
        f"{'backward ' * back}activation {kind}{' gated' * gate}": (
            triton_pointwise._activate_backward if back else triton_pointwise._activate,
            {**_ACTIVATION, "KIND": kind, "GATED": gate, "BIASED": not gate},
            set() if gate else {"bias"},
        )
        for back in (False, True)
        for kind, gate in ((0, True), (1, False), (2, True))
    },
    "sum 4096": (triton_pointwise._join, _sum(4096), set()),
    "sum 16384": (triton_pointwise._join, _sum(16384), set()),
    "backward sum 4096": (triton_pointwise._join_backward, _sum(4096), set()),
    "backward sum 16384": (triton_pointwise._join_backward, _sum(16384), set()),
    "backward LayerNorm": (triton_pointwise._join_backward, _sum(4096, CENTRED=True), set()),
    "backward norms around": (
        triton_pointwise._join_backward, _sum(4096, INNER=True), {"inner_weight"},
    ),
    "heads": (triton_rotary._turn, _HEADS, {"key", "value"}),
    "heads, normed": (triton_rotary._turn, _NORMED, {"key", "value"}),
    "backward heads": (triton_rotary._turn_backward, _HEADS, {"key", "value"}),
    "backward heads, normed": (triton_rotary._turn_backward, _NORMED, {"key", "value"}),
}  # fmt: skip
_SCALARS = ("epsilon",)
_SIZES = ("width", "stride", "query_head", "key_head", "value_head")


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_resources(case: str, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants, present = CASES[case]
    names = [parameter.name for parameter in kernel.params]
    signature, attributes, given = {}, {}, dict[str, Any]()
    for place, name in enumerate(names):
        if name in constants or name in ABSENT - present:
            signature[name], given[name] = "constexpr", constants.get(name)
        else:
            signature[name] = "fp32" if name in _SCALARS else "i32" if name.endswith(_SIZES) else "*bf16"
            if name not in _SCALARS:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, given, attributes)
    options = {"num_warps": constants["num_warps"]}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    dump = Path(triton.knobs.nvidia.cuobjdump.path)
    usage = subprocess.run([dump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", usage.stdout)
    assert found, usage.stdout
    assert int(found[1]) == 0, "registers spill"
    ptx = binary.asm["ptx"]
    # Rows are read and written 16 bytes at a time.
    assert not re.search(r"[sl][td]\.global\.b16", ptx)
    assert re.search(r"ld\.global[.\w]*\.v4", ptx) and re.search(r"st\.global[.\w]*\.v4", ptx)
