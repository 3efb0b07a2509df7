"""Triton's element-wise kernels compiled for GPUs that are not here: no spills, and wide accesses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import triton

from megatron_mux.kernels.pointwise import triton as triton_pointwise
from megatron_mux.kernels.pointwise import triton_rotary
from tests.unit.kernels.compiling import compile_for

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
    types = {name: "*bf16" for name in names if not name.endswith(_SIZES)} | dict.fromkeys(_SCALARS, "fp32")
    given = {**dict.fromkeys(ABSENT - present), **constants}
    found = compile_for(arch, kernel, types, given, {"num_warps": constants["num_warps"]}, tmp_path)
    assert found.stack == 0, "registers spill"
    # Rows are read and written 16 bytes at a time.
    assert not re.search(r"[sl][td]\.global\.b16", found.ptx)
    assert re.search(r"ld\.global[.\w]*\.v4", found.ptx) and re.search(r"st\.global[.\w]*\.v4", found.ptx)
