"""Products of routed experts, and the LoRAs of all tasks on them, by Triton kernels: one launch an operation.

Tiles of rows are laid out on the device (`experts.groups.Tiles`), as many as there can be: programs without work return
at once. A group's rows are divided from its own first row on, and summed in their order by one program: results do not
depend on neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_mux.kernels.experts.groups import ExpertGroups, Tiles
from megatron_mux.kernels.experts.interface import PRODUCT_ROWS, TILE_ROWS, ExpertKernels
from megatron_mux.kernels.experts.terms import ExpertTable
from megatron_mux.kernels.experts.triton_device import (
    expand_kernel,
    outer_kernel,
    product_kernel,
    reduce_kernel,
)
from megatron_mux.kernels.triton_launch import cdiv, launch

PRODUCT: dict[str, int] = {
    "ROWS": PRODUCT_ROWS, "WIDTH": 128, "INNER": 64, "num_warps": 8, "num_stages": 3,
}  # fmt: skip
"""Blocks of a product of 2-byte values."""
WIDE_PRODUCT: dict[str, int] = {**PRODUCT, "WIDTH": 64, "INNER": 32}
"""Of 4-byte ones."""
REDUCE: dict[str, int] = {
    "ROWS": TILE_ROWS, "RANKS": 32, "WIDTH": 128, "num_warps": 4, "num_stages": 4,
}  # fmt: skip
"""Blocks of `down` and `latent_gradient`."""
EXPAND: dict[str, int] = {**REDUCE, "num_stages": 2}
"""Blocks of `up_` and `input_gradient_`."""
OUTER: dict[str, int] = {"ROWS": 32, "RANKS": 32, "WIDTH": 64, "num_warps": 4, "num_stages": 3}
"""Blocks of `weight_gradients`."""


def product_(y: Tensor, x: Tensor, weight: Tensor, tiles: Tiles) -> None:
    """Write the product of each row of `x` `[P, in]` with the matrix of its expert to `y` `[P, out]`.

    Args:
        y: Written.
        weight: `[E, out, in]`, with any strides.
        tiles: The rows of each expert, in tiles of `PRODUCT_ROWS`.
    """
    blocks = PRODUCT if x.element_size() == 2 else WIDE_PRODUCT
    columns = cdiv(y.shape[1], blocks["WIDTH"])
    if len(tiles.group) and columns:
        arguments: tuple[Tensor | int, ...] = (
            y, x, weight, *tiles, len(tiles.start), columns, y.shape[1], x.shape[1], y.stride(0), x.stride(0),
            *weight.stride(),
        )  # fmt: skip
        constants = {"PRECISION": _precision(x), **blocks}
        launch(product_kernel, (len(tiles.group) * columns,), arguments, constants)


class TritonExpertKernels(ExpertKernels):
    """Kernels for fp16, bf16 and fp32; parameters' gradients are fp32, sums too."""

    @staticmethod
    def down(x: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.down`."""
        return _reduce(x, table, groups, up=False)

    @staticmethod
    def up_(y: Tensor, latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """See `ExpertKernels.up_`."""
        _expand_(y, latent, table, groups, up=True)

    @staticmethod
    def latent_gradient(dy: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.latent_gradient`."""
        return _reduce(dy, table, groups, up=True)

    @staticmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """See `ExpertKernels.input_gradient_`."""
        _expand_(dx, d_latent, table, groups, up=False)

    @staticmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups
    ) -> None:
        """See `ExpertKernels.weight_gradients`."""
        tiles = groups.tiles_of_tasks(table.bounds, TILE_ROWS)
        rank_blocks = cdiv(table.largest_rank, OUTER["RANKS"])
        for up, values, factor in ((False, x, d_latent), (True, dy, latent)):
            columns = cdiv(values.shape[1], OUTER["WIDTH"])
            grid = len(tiles.start) * rank_blocks * columns
            if grid:
                arguments = (
                    values, factor, table.entries, table.at, tiles.start, tiles.stop, table.slots, table.held,
                    rank_blocks, columns, values.shape[1], values.stride(0), factor.stride(0),
                )  # fmt: skip
                constants = {"UP": up, "PRECISION": _precision(values), **OUTER}
                launch(outer_kernel, (grid,), arguments, constants)


def _reduce(values: Tensor, table: ExpertTable, groups: ExpertGroups, up: bool) -> Tensor:
    """A row's values, of x or dy, to its latent columns."""
    tiles = groups.tiles_of_tasks(table.bounds, TILE_ROWS)
    latent = values.new_empty(values.shape[0], table.width)
    rank_blocks = cdiv(table.largest_rank, REDUCE["RANKS"])
    if len(tiles.group) and rank_blocks:
        arguments = (
            values, latent, table.entries, table.at, *tiles, table.slots, table.held, rank_blocks, values.shape[1],
            values.stride(0), latent.stride(0),
        )  # fmt: skip
        constants = {"UP": up, "PRECISION": _precision(values), **REDUCE}
        launch(reduce_kernel, (len(tiles.group) * rank_blocks,), arguments, constants)
    return latent


def _expand_(output: Tensor, latent: Tensor, table: ExpertTable, groups: ExpertGroups, up: bool) -> None:
    """A row's latent columns to those of y or dx, to which they are added."""
    tiles = groups.tiles_of_tasks(table.bounds, TILE_ROWS)
    columns = cdiv(output.shape[1], EXPAND["WIDTH"])
    if len(tiles.group) and columns:
        arguments = (
            output, latent, table.entries, table.at, *tiles, table.slots, table.held, columns, output.shape[1],
            output.stride(0), latent.stride(0),
        )  # fmt: skip
        constants = {"UP": up, "PRECISION": _precision(output), **EXPAND}
        launch(expand_kernel, (len(tiles.group) * columns,), arguments, constants)


def _precision(rows: Tensor) -> Any:
    """Of products of 4-byte values."""
    assert rows.stride(1) == 1, "rows are read along their columns"
    exact = rows.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"
