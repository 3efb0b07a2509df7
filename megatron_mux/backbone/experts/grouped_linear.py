"""The BaseOps of routed experts: a linear module for each expert that a rank holds, computed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_mux.backbone.experts.permutation import ExpertPermutation
from megatron_mux.kernels.experts.product import grouped_product


class GroupedLinear(nn.Module):
    """Multiplies the row of each pair with its expert's matrix.

    Args:
        in_features, out_features: Of an expert, on this rank.

    Attributes:
        weight: `[experts x out, in]`, one expert's rows after the other's.
    """

    def __init__(self, held: tuple[int, ...], in_features: int, out_features: int) -> None:
        super().__init__()
        self.held, self.in_features, self.out_features = held, in_features, out_features
        self.weight = nn.Parameter(torch.empty(len(held) * out_features, in_features))

    def forward(self, x: Tensor, pairs: ExpertPermutation) -> Tensor:
        """`[P, in]` to `[P, out]`."""
        return grouped_product(x, self.matrices, pairs.groups)

    @property
    def matrices(self) -> Tensor:
        """`[experts, out, in]`."""
        return self.weight.view(len(self.held), self.out_features, self.in_features)

    def place(self, held: tuple[int, ...], matrices: Sequence[Tensor]) -> None:
        """Hold other experts from now on.

        Args:
            matrices: The matrix of each, `[out, in]`.
        """
        own = self.weight
        value = own.new_empty(len(held) * self.out_features, self.in_features)
        self.held, self.weight = held, nn.Parameter(value, requires_grad=own.requires_grad)
        for place, matrix in zip(self.matrices, matrices, strict=True):
            place.copy_(matrix)
