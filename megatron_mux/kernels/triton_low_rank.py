"""Low-rank terms of all tasks by Triton kernels: one launch an operation, two for the gradients of weights.

Work is cut into blocks in proportion to what each term has to compute and to move (MuxTune section 4): tiles of a
task's rows x its terms x blocks of their ranks or columns. Programs without work return at once. A block's size does
not depend on who else is there, nor does the order in which a row's products are summed.

Where no GPU is at hand the kernels run in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mux.kernels.groups import TILE_ROWS, RowGroups
from megatron_mux.kernels.low_rank import LowRankKernels
from megatron_mux.kernels.terms import TermTable
from megatron_mux.kernels.triton_low_rank_device import input_gradient_kernel, reduce_kernel, up_kernel
from megatron_mux.kernels.triton_weight_gradients import weight_gradient_kernel

DOWN: dict[str, int] = {"ROWS": 32, "RANKS": 32, "WIDTH": 128, "num_warps": 4, "num_stages": 4}
"""Blocks of `down`: half a tile, so that few rows still occupy many multiprocessors."""
LATENT_GRADIENT: dict[str, int] = {**DOWN, "num_stages": 8}
"""Blocks of `latent_gradient`: column lists come first, so that as many loads are under way from twice the stages."""
EXPAND: dict[str, int] = {"ROWS": TILE_ROWS, "RANKS": 32, "WIDTH": 128, "num_warps": 8, "num_stages": 2}
"""Blocks of `up_` and `input_gradient_`."""
OUTER: dict[str, int] = {"ROWS": 64, "RANKS": 32, "WIDTH": 64, "num_warps": 4, "num_stages": 3}
"""Blocks of `weight_gradients`."""


class TritonKernels(LowRankKernels):
    """Kernels for fp16, bf16 and fp32; parameters' gradients are fp32, sums too.

    A task's terms at a BaseOp must not share output columns: each is added by programs of its own.
    """

    @staticmethod
    def down(x: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.down`."""
        return _reduce(x, table, groups, up=False)

    @staticmethod
    def up_(y: Tensor, latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `LowRankKernels.up_`."""
        grid = (len(groups.tiles), triton.cdiv(y.shape[1], EXPAND["WIDTH"]), table.most_terms)
        _launch(
            up_kernel, grid, table, y, latent, groups.tiles, groups.table, y.stride(0), latent.stride(0), **EXPAND
        )  # fmt: skip

    @staticmethod
    def latent_gradient(dy: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.latent_gradient`."""
        return _reduce(dy, table, groups, up=True)

    @staticmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `LowRankKernels.input_gradient_`."""
        grid = (len(groups.tiles), triton.cdiv(dx.shape[1], EXPAND["WIDTH"]), min(table.most_terms, 1))
        _launch(
            input_gradient_kernel, grid, table, dx, d_latent, groups.tiles, groups.table, groups.sequence_ids,
            groups.token_index, dx.stride(0), d_latent.stride(0), dx.shape[1],
            DROPOUT=groups.training and table.has_dropout, **EXPAND,
        )  # fmt: skip

    @staticmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups
    ) -> None:
        """See `LowRankKernels.weight_gradients`."""
        for up, values in enumerate((x, dy)):
            rank_blocks = triton.cdiv(table.largest_rank, OUTER["RANKS"])
            blocks = triton.cdiv(values.shape[1], OUTER["WIDTH"])
            _launch(
                weight_gradient_kernel, (table.most_terms * rank_blocks, blocks, len(groups.rows)), table,
                values, latent, d_latent, groups.table, groups.sequence_ids, groups.token_index, rank_blocks,
                values.stride(0), latent.stride(0), x.shape[1], UP=bool(up),
                DROPOUT=not up and groups.training and table.has_dropout, **OUTER,
            )  # fmt: skip


def _reduce(values: Tensor, table: TermTable, groups: RowGroups, up: bool) -> Tensor:
    """A row's values, of x or dy, to its latent columns."""
    blocks = LATENT_GRADIENT if up else DOWN
    latent = values.new_empty(values.shape[0], table.width(groups))
    rank_blocks = triton.cdiv(table.largest_rank, blocks["RANKS"])
    grid = (table.most_terms * rank_blocks, len(groups.tiles) * (TILE_ROWS // blocks["ROWS"]))
    _launch(
        reduce_kernel, grid, table, values, latent, groups.tiles, groups.table, groups.sequence_ids,
        groups.token_index, rank_blocks, values.stride(0), latent.stride(0), values.shape[1], UP=up,
        DROPOUT=not up and groups.training and table.has_dropout, TILE=TILE_ROWS, **blocks,
    )  # fmt: skip
    return latent


_TYPES: dict[torch.dtype | None, Any] = {
    None: None,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def alignment_of(table: TermTable, rows: Tensor) -> int:
    """`TermTable.alignment`, if 16 bytes at once can be read from the start of every row of `[T, N]`; else 0."""
    return 0 if rows.data_ptr() % 16 or rows.stride(0) % 8 else table.alignment


def _launch(
    kernel: Any, grid: tuple[int, ...], table: TermTable, rows: Tensor, *arguments: Any, **options: Any
) -> None:
    """Launch a kernel on a table and `rows` `[T, N]`, unless there is nothing to do."""
    assert rows.stride(1) == 1 and rows.dtype in _TYPES, rows.dtype
    if not all(grid):
        return
    exact = rows.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    kernel[grid](
        table.entries,
        table.first_entry,
        len(table.first_entry) - 1,
        rows,
        *arguments,
        FACTORS=_TYPES[table.factor_dtype],
        ALIGNED=alignment_of(table, rows),
        PRECISION="ieee" if exact else "tf32",
        **options,
    )
