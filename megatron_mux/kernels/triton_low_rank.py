"""Low-rank terms of all tasks by Triton kernels: one launch an operation, two for the gradients of weights.

Work is cut into blocks in proportion to what each term has to compute and to move (MuxTune section 4): tiles of a
task's rows x its terms x blocks of their ranks or columns. Programs without work return at once. A block's size does
not depend on who else is there, nor does the order in which a row's products are summed.

Where no GPU is at hand the kernels run in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from collections.abc import Callable
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

    Attributes:
        LAUNCHES: Device launches of each operation at most, however many tasks there are.
    """

    LAUNCHES = {"down": 1, "up_": 1, "latent_gradient": 1, "input_gradient_": 1, "weight_gradients": 2}

    @staticmethod
    def down(x: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.down`."""
        return _reduce(x, table, groups, up=False)

    @staticmethod
    def up_(y: Tensor, latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `LowRankKernels.up_`."""
        grid = (len(groups.tiles), triton.cdiv(y.shape[1], EXPAND["WIDTH"]), table.most_terms)
        _launch(
            up_kernel, grid, y, latent, table.entries, table.first_entry, groups.tiles, groups.table,
            len(table.first_entry) - 1, y.stride(0), latent.stride(0), **_options(table, y), **EXPAND,
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
            input_gradient_kernel, grid, dx, d_latent, table.entries, table.first_entry, groups.tiles, groups.table,
            groups.sequence_ids, groups.token_index, len(table.first_entry) - 1, dx.stride(0), d_latent.stride(0),
            dx.shape[1], DROPOUT=groups.training and table.has_dropout, **_options(table, dx), **EXPAND,
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
                weight_gradient_kernel, (table.most_terms * rank_blocks, blocks, len(groups.rows)),
                values, latent, d_latent, table.entries, table.first_entry, groups.table, groups.sequence_ids,
                groups.token_index, len(table.first_entry) - 1, rank_blocks, values.stride(0), latent.stride(0),
                x.shape[1], UP=bool(up), DROPOUT=not up and groups.training and table.has_dropout,
                **_options(table, values), **OUTER,
            )  # fmt: skip

    @staticmethod
    def load(x: Tensor, dy: Tensor, table: TermTable) -> None:
        """Compile the kernels for these terms and load them onto the device; no result is written.

        The first launch of a kernel waits for everything on the device: to be called while no message is outstanding.

        Args:
            x: `[T, K]` of the BaseOp's dtype, T >= 1.
            dy: `[T, N]` likewise.
            table: The terms.
        """
        stranger = len(table.first_entry) - 1  # a slot without terms
        table_and_tiles = torch.tensor([stranger, 0, 1, 0, 0, 0, 1], dtype=torch.int32).to(x.device)
        rows, tiles = table_and_tiles[:4].view(1, 4), table_and_tiles[4:].view(1, 3)
        for training in {table.has_dropout, False}:
            groups = RowGroups((stranger,), ((0, 1),), (0,), training, rows, tiles, tiles[0], tiles[0])
            latent = TritonKernels.down(x, table, groups)
            TritonKernels.up_(dy, latent, table, groups)
            d_latent = TritonKernels.latent_gradient(dy, table, groups)
            TritonKernels.input_gradient_(x, d_latent, table, groups)
            TritonKernels.weight_gradients(x, latent, dy, d_latent, table, groups)


def _reduce(values: Tensor, table: TermTable, groups: RowGroups, up: bool) -> Tensor:
    """A row's values, of x or dy, to its latent columns."""
    blocks = LATENT_GRADIENT if up else DOWN
    latent = values.new_empty(values.shape[0], table.width(groups))
    rank_blocks = triton.cdiv(table.largest_rank, blocks["RANKS"])
    grid = (table.most_terms * rank_blocks, len(groups.tiles) * (TILE_ROWS // blocks["ROWS"]))
    _launch(
        reduce_kernel, grid, values, latent, table.entries, table.first_entry, groups.tiles, groups.table,
        groups.sequence_ids, groups.token_index, len(table.first_entry) - 1, rank_blocks, values.stride(0),
        latent.stride(0), values.shape[1], UP=up, DROPOUT=not up and groups.training and table.has_dropout,
        TILE=TILE_ROWS, **_options(table, values), **blocks,
    )  # fmt: skip
    return latent


def _options(table: TermTable, values: Tensor) -> dict[str, Any]:
    """Constants that all kernels take."""
    assert values.stride(1) == 1
    exact = values.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    factors = table.factor_dtype
    return {
        "FACTORS": None if factors is None else _TYPES[factors],
        "ALIGNED": table.aligned,
        "PRECISION": "ieee" if exact else "tf32",
    }


_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, unless there is nothing to do."""
    if all(grid):
        launch: Callable[..., Any] = kernel[grid]
        launch(*arguments, **options)
