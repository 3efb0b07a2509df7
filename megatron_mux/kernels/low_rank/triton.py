"""Terms of all tasks by Triton kernels: one launch an operation, two or three for the gradients of weights.

Work is cut into blocks in proportion to what each term has to compute and to move (MuxTune section 4): tiles of a
task's rows x its terms x blocks of their ranks or columns. Programs without work return at once. A block's size does
not depend on who else is there, nor does the order in which a row's products are summed.

Where no GPU is at hand the kernels run in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from megatron_mux.kernels.groups import PART_ROWS, TILE_ROWS, RowGroups
from megatron_mux.kernels.low_rank.grouped_rows import GroupedKernels
from megatron_mux.kernels.low_rank.product import RANK_BLOCK, partials_of
from megatron_mux.kernels.low_rank.terms import TermTable
from megatron_mux.kernels.low_rank.triton_device import input_gradient_kernel, reduce_kernel, up_kernel
from megatron_mux.kernels.low_rank.triton_rows import (
    activation_kernel,
    factor_gradient_kernel,
    scale_kernel,
)
from megatron_mux.kernels.low_rank.triton_weight_gradients import add_parts_kernel, weight_gradient_kernel
from megatron_mux.kernels.triton_launch import cdiv, launch

DOWN: dict[str, int] = {"ROWS": 64, "RANKS": 64, "WIDTH": 128, "num_warps": 8, "num_stages": 3}
"""Blocks of `down`: wide in ranks, so that a row is read, and its dropout's hashes computed, once for most terms."""
WIDE_DOWN: dict[str, int] = {"ROWS": 32, "RANKS": 32, "WIDTH": 128, "num_warps": 4, "num_stages": 3}
"""The same for values of 4 bytes, which have to fit into the shared memory of GPUs with 99 KiB of it."""
LATENT_GRADIENT: dict[str, int] = {"ROWS": 32, "RANKS": 32, "WIDTH": 128, "num_warps": 4, "num_stages": 8}
"""Blocks of `latent_gradient`: each load waits for one of a column list, so it takes twice the stages to have as many
loads under way."""
EXPAND: dict[str, int] = {"ROWS": TILE_ROWS, "RANKS": 32, "WIDTH": 64, "num_warps": 4, "num_stages": 2}
"""Blocks of `up_` and `input_gradient_`."""
OUTER: dict[str, int] = {"ROWS": 64, "RANKS": RANK_BLOCK, "WIDTH": 64, "num_warps": 4, "num_stages": 3}
"""Blocks of `weight_gradients`."""
PARTS: dict[str, int] = {"RANKS": RANK_BLOCK, "WIDTH": 16, "num_warps": 4, "num_stages": 1}
"""Blocks of the sums of parts."""
ACTIVATION: dict[str, int] = {"ROWS": TILE_ROWS, "RANKS": 32, "num_warps": 4, "num_stages": 1}
"""Blocks of `activated` and `activation_gradient_`."""
SCALE: dict[str, int] = {"ROWS": TILE_ROWS, "WIDTH": 128, "num_warps": 8, "num_stages": 1}
"""Blocks of `scale_`."""
FACTOR_GRADIENT: dict[str, int] = {"ROWS": 64, "WIDTH": 64, "num_warps": 4, "num_stages": 3}
"""Blocks of `factor_gradients`."""


class TritonKernels(GroupedKernels):
    """Kernels for fp16, bf16 and fp32; parameters' gradients are fp32, sums too."""

    @staticmethod
    def down(x: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.down`."""
        return _reduce(x, table, groups, up=False)

    @staticmethod
    def up_(y: Tensor, latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `LowRankKernels.up_`."""
        grid = (groups.tiles.shape[0], cdiv(y.shape[1], EXPAND["WIDTH"]), table.most_terms)
        _launch(
            up_kernel, grid, table, y, latent, groups.tiles, groups.row_ranges, y.stride(0), latent.stride(0),
            BIASED=table.has_biases, **_products(table, y), **EXPAND,
        )  # fmt: skip

    @staticmethod
    def latent_gradient(dy: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.latent_gradient`."""
        return _reduce(dy, table, groups, up=True)

    @staticmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `LowRankKernels.input_gradient_`."""
        grid = (groups.tiles.shape[0], cdiv(dx.shape[1], EXPAND["WIDTH"]), min(table.most_terms, 1))
        _launch(
            input_gradient_kernel, grid, table, dx, d_latent, groups.tiles, groups.row_ranges, groups.sequence_ids,
            groups.token_index, dx.stride(0), d_latent.stride(0), dx.shape[1],
            DROPOUT=groups.training and table.has_dropout, **_products(table, dx), **EXPAND,
        )  # fmt: skip

    @staticmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups
    ) -> None:
        """See `LowRankKernels.weight_gradients`."""
        rank_blocks = cdiv(table.largest_rank, RANK_BLOCK)
        terms, count = table.most_terms * rank_blocks, len(groups.rows)
        partials = [partials_of(values, table, groups) for values in (x, dy)]
        for up, (values, partial) in enumerate(zip((x, dy), partials, strict=True)):
            parts = groups.parts if partial.shape[0] else 0
            _launch(
                weight_gradient_kernel, (terms, cdiv(values.shape[1], OUTER["WIDTH"]), count + parts), table,
                values, latent, d_latent, partial, groups.row_ranges, groups.sequence_ids, groups.token_index,
                rank_blocks, count, parts, values.stride(0), latent.stride(0), x.shape[1], values.shape[1], UP=bool(up),
                BIASED=table.has_biases, DROPOUT=not up and groups.training and table.has_dropout, PART=PART_ROWS,
                **_products(table, values), **OUTER,
            )  # fmt: skip
        if any(partial.shape[0] for partial in partials):
            down, up_ = partials
            down_blocks, up_blocks = (
                cdiv(values.shape[1], PARTS["WIDTH"]) if partial.shape[0] else 0
                for values, partial in zip((x, dy), partials, strict=True)
            )
            _launch(
                add_parts_kernel, (terms, down_blocks + up_blocks, count), table, down, up_, groups.row_ranges,
                rank_blocks, down_blocks, x.shape[1], dy.shape[1], PART=PART_ROWS, **PARTS,
            )  # fmt: skip

    @staticmethod
    def activated(latent: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `GroupedKernels.activated`."""
        return _activate(latent, None, table, groups)

    @staticmethod
    def activation_gradient_(d_latent: Tensor, latent: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `GroupedKernels.activation_gradient_`."""
        return _activate(latent, d_latent, table, groups)

    @staticmethod
    def scale_(values: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `GroupedKernels.scale_`."""
        grid = (groups.tiles.shape[0], cdiv(values.shape[1], SCALE["WIDTH"]), table.most_terms)
        _launch(
            scale_kernel, grid, table, values, groups.tiles, groups.row_ranges, values.stride(0),
            FACTORS=_TYPES[table.factor_dtype], **SCALE,
        )  # fmt: skip

    @staticmethod
    def factor_gradients(values: Tensor, gradient: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `GroupedKernels.factor_gradients`."""
        blocks = cdiv(values.shape[1], FACTOR_GRADIENT["WIDTH"])
        aligned = bool(alignment_of(table, values) and alignment_of(table, gradient))
        _launch(
            factor_gradient_kernel, (blocks, len(groups.rows), table.most_terms), table, values, gradient,
            groups.row_ranges, values.stride(0), gradient.stride(0), ALIGNED=aligned, **FACTOR_GRADIENT,
        )  # fmt: skip


def _activate(latent: Tensor, d_latent: Tensor | None, table: TermTable, groups: RowGroups) -> Tensor:
    """The activated latent tensor; `d_latent` is changed in place if it is given."""
    hidden = torch.empty_like(latent)
    rank_blocks = cdiv(table.largest_rank, ACTIVATION["RANKS"])
    _launch(
        activation_kernel, (groups.tiles.shape[0], table.most_terms * rank_blocks), table, latent, hidden,
        latent if d_latent is None else d_latent, groups.tiles, groups.row_ranges, rank_blocks, latent.stride(0),
        BACKWARD=d_latent is not None, **ACTIVATION,
    )  # fmt: skip
    return hidden


def _reduce(values: Tensor, table: TermTable, groups: RowGroups, up: bool) -> Tensor:
    """A row's values, of x or dy, to its latent columns."""
    blocks = LATENT_GRADIENT if up else DOWN if values.element_size() == 2 else WIDE_DOWN
    latent = values.new_empty(values.shape[0], table.width(groups))
    rank_blocks = cdiv(table.largest_rank, blocks["RANKS"])
    grid = (table.most_terms * rank_blocks, groups.tiles.shape[0] * (TILE_ROWS // blocks["ROWS"]))
    _launch(
        reduce_kernel, grid, table, values, latent, groups.tiles, groups.row_ranges, groups.sequence_ids,
        groups.token_index, rank_blocks, values.stride(0), latent.stride(0), values.shape[1], UP=up,
        DROPOUT=not up and groups.training and table.has_dropout, TILE=TILE_ROWS, **_products(table, values),
        **blocks,
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


def _products(table: TermTable, rows: Tensor) -> dict[str, Any]:
    """Constants of kernels that compute matrix products with A or B."""
    exact = rows.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return {"FACTORS": _TYPES[table.factor_dtype], "PRECISION": "ieee" if exact else "tf32"}


def _launch(
    kernel: Any, grid: tuple[int, ...], table: TermTable, rows: Tensor, *arguments: Any, **options: Any
) -> None:
    """Launch a kernel on a table and `rows` `[T, N]`, unless there is nothing to do."""
    assert rows.stride(1) == 1 and rows.dtype in _TYPES, rows.dtype
    if not all(grid):
        return
    options.setdefault("ALIGNED", alignment_of(table, rows))
    slots = table.first_entry.shape[0] - 1
    launch(kernel, grid, (table.entries, table.first_entry, slots, rows, *arguments), options)
