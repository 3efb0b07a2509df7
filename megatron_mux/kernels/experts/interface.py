"""The operations of all tasks' low-rank terms on routed experts: one interface, several kernels.

Every operation works on the rows of one expert and task alone: a task's NaN stays its own.

Shapes: P rows, ordered by expert and task, K and N input and output width, W latent columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from megatron_mux.kernels.experts.groups import ExpertGroups
from megatron_mux.kernels.experts.terms import ExpertTable

PRODUCT_ROWS = 128
"""Rows of a tile of Triton's frozen product."""
TILE_ROWS = 32
"""Rows of a tile of one expert and task: they are few."""

LAUNCHES = {"down": 1, "up_": 1, "latent_gradient": 1, "input_gradient_": 1, "weight_gradients": 2}
"""Device launches of each operation by Triton kernels at most, besides those that lay out tiles."""


class ExpertKernels(ABC):
    """The operations around a product; those of `LowRankKernels`, for an expert and task each."""

    @staticmethod
    @abstractmethod
    def down(x: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """`[P, W]`: `x A^T` of each row's expert and task; columns beyond its rank are unspecified."""

    @staticmethod
    @abstractmethod
    def up_(y: Tensor, latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """Add `scale * latent B^T` to `y` `[P, N]`, in place."""

    @staticmethod
    @abstractmethod
    def latent_gradient(dy: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """`[P, W]`: `scale * dy B`."""

    @staticmethod
    @abstractmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """Add `d_latent A` to `dx` `[P, K]`, in place."""

    @staticmethod
    @abstractmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups
    ) -> None:
        """Add `d_latent^T x` and `scale * dy^T latent` to where the terms keep the gradients of A and B."""
