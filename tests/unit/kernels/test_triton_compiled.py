"""Triton kernels compiled for GPUs that are not here: spills, shared memory, wide loads, tensor cores.

Numbers of registers are not held: they change with Triton's version.

The numbers of rows, columns and ranks are no constants of the kernels: one binary serves every shape of Llama-3-8B (and
all whose sizes are multiples of 16) at every rank that is a multiple of 8.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import triton

from megatron_mux.kernels import groups
from megatron_mux.kernels.experts import triton as triton_experts
from megatron_mux.kernels.experts import triton_device as triton_experts_device
from megatron_mux.kernels.loss import triton as triton_cross_entropy
from megatron_mux.kernels.low_rank import triton as triton_low_rank
from megatron_mux.kernels.low_rank.triton_device import input_gradient_kernel, reduce_kernel, up_kernel
from megatron_mux.kernels.low_rank.triton_rows import (
    activation_kernel,
    factor_gradient_kernel,
    scale_kernel,
)
from megatron_mux.kernels.low_rank.triton_weight_gradients import add_parts_kernel, weight_gradient_kernel
from megatron_mux.kernels.update import table as bucket_update
from megatron_mux.kernels.update import triton as triton_update
from tests.unit.kernels.compiling import Compiled, compile_for

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}  # bytes a block may take


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled in an earlier run of all tests is compiled anew; what another test compiled is not."""
    session = tmp_path_factory.getbasetemp()
    shared = session.parent if "PYTEST_XDIST_WORKER" in os.environ else session
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared / "triton"))


def compiled(
    kernel: Any, arch: int, blocks: dict[str, int], path: Path, *, values: Any = "bf16", **constants: Any
) -> Compiled:
    """Compile for bf16, or other values, with sizes and strides that are multiples of 16."""
    constants = {
        "FACTORS": None,
        "BIASED": False,
        "ALIGNED": 8,
        "PRECISION": "tf32",
        "TILE": 64,
        "PART": groups.PART_ROWS,
        **blocks,
        **constants,
    }
    halves = ("logits", "values", "latent", "d_latent", "output", "gradient", "hidden", "x", "y", "weight")
    types = dict.fromkeys(halves, values)
    types |= {"entries": "i64"} | dict.fromkeys(
        ("first_entry", "tiles", "row_ranges", "sequence_ids", "token_index", "of_pieces"), "i32"
    )
    statistics = ("top", "total", "target", "sums", "smoothing")
    types |= dict.fromkeys((*statistics, "partials", "up_partials"), "fp32")
    if "top" in kernel.arg_names:
        types["columns"] = "i64"  # of labels; elsewhere a number of blocks
    types |= dict.fromkeys(("at", "group_of", "start", "stop", "last"), "i32")
    types |= {"skip": "u8"} | dict.fromkeys(("settings", "norms", "squares"), "fp64")
    options = {name: blocks[name] for name in ("num_warps", "num_stages")}
    pointers = {name: f"*{kind}" for name, kind in types.items()}
    return compile_for(arch, kernel, pointers, constants, options, path)


CASES = {
    "down": (reduce_kernel, triton_low_rank.DOWN, {"UP": False, "DROPOUT": False}),
    "down, dropout": (reduce_kernel, triton_low_rank.DOWN, {"UP": False, "DROPOUT": True}),
    "up": (up_kernel, triton_low_rank.EXPAND, {}),
    "latent gradient": (reduce_kernel, triton_low_rank.LATENT_GRADIENT, {"UP": True, "DROPOUT": False}),
    "input gradient, dropout": (input_gradient_kernel, triton_low_rank.EXPAND, {"DROPOUT": True}),
    "gradient of A, dropout": (weight_gradient_kernel, triton_low_rank.OUTER, {"UP": False, "DROPOUT": True}),
    "gradient of B": (weight_gradient_kernel, triton_low_rank.OUTER, {"UP": True, "DROPOUT": False}),
}
# Of bottlenecks, besides those of low-rank terms.
BIASED = {
    "up, biases": (up_kernel, triton_low_rank.EXPAND, {"BIASED": True}),
    "gradient of A, biases": (
        weight_gradient_kernel,
        triton_low_rank.OUTER,
        {"UP": False, "DROPOUT": False, "BIASED": True},
    ),
    "gradient of B, biases": (
        weight_gradient_kernel,
        triton_low_rank.OUTER,
        {"UP": True, "DROPOUT": False, "BIASED": True},
    ),
}
CASES |= BIASED
# Without matrix products.
OF_ROWS = {
    "activation": (activation_kernel, triton_low_rank.ACTIVATION, {"BACKWARD": False}),
    "its gradient": (activation_kernel, triton_low_rank.ACTIVATION, {"BACKWARD": True}),
    "factors": (scale_kernel, triton_low_rank.SCALE, {"FACTORS": triton.language.float32}),
    "gradient of factors": (factor_gradient_kernel, triton_low_rank.FACTOR_GRADIENT, {}),
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", OF_ROWS)
def test_resources_of_rows(case: str, arch: int, tmp_path: Path) -> None:
    kernel, blocks, constants = OF_ROWS[case]
    found = compiled(kernel, arch, blocks, tmp_path, **constants)
    assert found.stack == 0, "registers spill"
    assert found.shared <= SHARED_MEMORY[arch] // 4, "four programs of a multiprocessor"
    # Rows are read and written 16 bytes at a time.
    assert not re.search(r"[sl][td]\.global\.b16", found.ptx)
    assert re.search(r"ld\.global[.\w]*\.v4|cp\.async\.cg", found.ptx)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_resources(case: str, arch: int, tmp_path: Path) -> None:
    kernel, blocks, constants = CASES[case]
    found = compiled(kernel, arch, blocks, tmp_path, **constants)
    assert found.stack == 0, "registers spill"
    assert found.shared <= SHARED_MEMORY[arch] // 2, "two programs of a multiprocessor"
    assert "mma.sync" in found.ptx or "wgmma.mma_async" in found.ptx, "no tensor cores"
    # Rows are read and written 16 bytes at a time; column lists do not break that.
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", found.ptx)
    assert re.search(r"st\.global[.\w]*\.v4", found.ptx) and not re.search(
        r"[sl][td]\.global\.b16", found.ptx
    )


def test_values_of_4_bytes_fit_into_every_gpu(tmp_path: Path) -> None:
    for kernel, blocks, constants in (
        (reduce_kernel, triton_low_rank.WIDE_DOWN, {"UP": False, "DROPOUT": True}),
        (reduce_kernel, triton_low_rank.LATENT_GRADIENT, {"UP": True, "DROPOUT": False}),
        (up_kernel, triton_low_rank.EXPAND, {}),
        (input_gradient_kernel, triton_low_rank.EXPAND, {"DROPOUT": True}),
        (weight_gradient_kernel, triton_low_rank.OUTER, {"UP": True, "DROPOUT": False}),
    ):
        assert compiled(kernel, 89, blocks, tmp_path, values="fp32", **constants).shared <= 99 << 10


@pytest.mark.parametrize("arch", [80, 90])
def test_resources_of_parts(arch: int, tmp_path: Path) -> None:
    found = compiled(add_parts_kernel, arch, triton_low_rank.PARTS, tmp_path)
    assert found.stack == 0, "registers spill"
    assert len(re.findall(r"ld\.global[.\w]*\.v4", found.ptx)) >= 2, "parts are read 16 bytes at a time"


EXPERTS: dict[str, tuple[Any, dict[str, int], dict[str, Any]]] = {
    # The matrices' rows lie next to each other in the forward pass, their columns in the backward pass.
    "product": (triton_experts_device.product_kernel, triton_experts.PRODUCT, {"in_stride": 1}),
    "its gradient": (triton_experts_device.product_kernel, triton_experts.PRODUCT, {"out_stride": 1}),
    "down": (triton_experts_device.reduce_kernel, triton_experts.REDUCE, {"UP": False}),
    "latent gradient": (triton_experts_device.reduce_kernel, triton_experts.REDUCE, {"UP": True}),
    "up": (triton_experts_device.expand_kernel, triton_experts.EXPAND, {"UP": True}),
    "input gradient": (triton_experts_device.expand_kernel, triton_experts.EXPAND, {"UP": False}),
    "gradient of A": (triton_experts_device.outer_kernel, triton_experts.OUTER, {"UP": False}),
    "gradient of B": (triton_experts_device.outer_kernel, triton_experts.OUTER, {"UP": True}),
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", EXPERTS)
def test_resources_of_experts(case: str, arch: int, tmp_path: Path) -> None:
    kernel, blocks, constants = EXPERTS[case]
    found = compiled(kernel, arch, blocks, tmp_path, **constants)
    assert found.stack == 0, "registers spill"
    assert found.shared <= SHARED_MEMORY[arch]
    assert "mma.sync" in found.ptx or "wgmma.mma_async" in found.ptx, "no tensor cores"
    # Rows are read 16 bytes at a time; of B, columns of an expert are far apart.
    assert re.search(
        r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10|ld\.global[.\w]*\.v4", found.ptx
    )


@pytest.mark.parametrize("arch", [80, 90])
def test_resources_of_updates(arch: int, tmp_path: Path) -> None:
    blocks = {"num_warps": 4, "num_stages": 3}
    constants = {"COPY": triton.language.bfloat16, "TILE": bucket_update.TILE}
    update = compiled(triton_update._update, arch, blocks, tmp_path, **constants)
    squares = compiled(triton_update._tile_squares, arch, blocks, tmp_path, **constants)
    wide = bucket_update.TILE // (
        32 * blocks["num_warps"] * 4
    )  # accesses of 16 bytes a thread, to a tile of fp32
    for found, read, written in ((update, 4, 4), (squares, 1, 0)):
        assert found.stack == 0
        assert len(re.findall(r"ld\.global[.\w]*\.v4", found.ptx)) == read * wide
        assert len(re.findall(r"st\.global[.\w]*\.v4", found.ptx)) >= written * wide


def test_gradients_are_loaded_before_they_are_zeroed(tmp_path: Path) -> None:
    """Zeros do not depend on what was loaded, and 16-bit copies give loads and stores of fp32 different layouts."""
    blocks = {"num_warps": 4, "num_stages": 3}
    constants = {"COPY": triton.language.bfloat16, "TILE": bucket_update.TILE}
    found = compiled(triton_update._update, 90, blocks, tmp_path, **constants)
    zeroed, under_way = 0, False
    for line in found.ttgir.splitlines():
        if "tt.load" in line:
            under_way = True
        elif "barrier" in line:
            under_way = False
        elif re.search(r"tt\.store %\w+, %cst", line):
            zeroed += 1
            assert not under_way, "a thread may zero what another one has not loaded yet"
    assert zeroed == 2, "aligned pieces, and others"


@pytest.mark.parametrize("arch", [80, 90])
def test_resources_of_cross_entropy(arch: int, tmp_path: Path) -> None:
    for kernel, blocks, constants in (
        (triton_cross_entropy.statistics_kernel, triton_cross_entropy.STATISTICS, {"SUMS": False}),
        (triton_cross_entropy.gradient_kernel, triton_cross_entropy.GRADIENT, {"SMOOTHED": False}),
    ):
        found = compiled(kernel, arch, blocks, tmp_path, **constants)
        assert found.stack == 0, "registers spill"
        assert re.search(r"ld\.global[.\w]*\.v4|cp\.async\.cg", found.ptx)


def test_odd_ranks_leave_wide_accesses(tmp_path: Path) -> None:
    """A task of rank 1 slows no one's access to the wide tensors."""
    for case in ("up", "latent gradient", "gradient of B"):
        kernel, blocks, constants = CASES[case]
        found = compiled(kernel, 90, blocks, tmp_path, **{**constants, "ALIGNED": 1})
        assert found.stack == 0 and re.search(r"ld\.global[.\w]*\.v4|cp\.async\.cg", found.ptx)


def test_unaligned_terms_do_not_spill(tmp_path: Path) -> None:
    for kernel, blocks, constants in OF_ROWS.values():
        assert compiled(kernel, 90, blocks, tmp_path, **{**constants, "ALIGNED": 0}).stack == 0


@pytest.mark.parametrize("case", CASES)
def test_alignment_changes_no_product(case: str, tmp_path: Path) -> None:
    """Accesses are as wide as all tasks allow, but the order of sums within products is the same in any case."""
    kernel, blocks, constants = CASES[case]
    products = []
    for aligned in (8, 1, 0):
        found = compiled(kernel, 90, blocks, tmp_path, **{**constants, "ALIGNED": aligned})
        assert found.stack == 0, "registers spill"
        products.append(Counter(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[.\w:]*", found.ptx)))
    assert products[0] and products[0] == products[1] == products[2]
