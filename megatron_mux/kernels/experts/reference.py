"""Low-rank terms on routed experts by BLAS calls, group by group."""

from __future__ import annotations

from torch import Tensor

from megatron_mux.kernels.experts.groups import ExpertGroups
from megatron_mux.kernels.experts.interface import ExpertKernels
from megatron_mux.kernels.experts.terms import ExpertTable
from megatron_mux.kernels.low_rank.reference import LoopKernels


class LoopExpertKernels(ExpertKernels):
    """Group by group: exact in every dtype, on every device, the reference. The host reads the groups."""

    @staticmethod
    def down(x: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.down`."""
        return LoopKernels.down(x, table.loops, groups.rows)

    @staticmethod
    def up_(y: Tensor, latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """See `ExpertKernels.up_`."""
        LoopKernels.up_(y, latent, table.loops, groups.rows)

    @staticmethod
    def latent_gradient(dy: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.latent_gradient`."""
        return LoopKernels.latent_gradient(dy, table.loops, groups.rows)

    @staticmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """See `ExpertKernels.input_gradient_`."""
        LoopKernels.input_gradient_(dx, d_latent, table.loops, groups.rows)

    @staticmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups
    ) -> None:
        """See `ExpertKernels.weight_gradients`."""
        LoopKernels.weight_gradients(x, latent, dy, d_latent, table.loops, groups.rows)
