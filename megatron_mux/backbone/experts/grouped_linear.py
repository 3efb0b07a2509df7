"""The BaseOps of routed experts: a linear module for each expert that a rank holds, computed together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_mux.backbone.experts.pairs import Pairs
from megatron_mux.kernels.grouped_product import grouped_product


class GroupedLinear(nn.Module):
    """Multiplies the row of each pair with its expert's matrix.

    Args:
        experts: Experts that this rank holds.
        in_features, out_features: Of an expert, on this rank.

    Attributes:
        weight: `[experts x out, in]`, one expert's rows after the other's.
    """

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(experts * out_features, in_features))

    def forward(self, x: Tensor, pairs: Pairs) -> Tensor:
        """`[P, in]` to `[P, out]`."""
        return grouped_product(x, self.matrices, pairs.counts)

    @property
    def matrices(self) -> Tensor:
        """`[experts, out, in]`."""
        return self.weight.view(self.experts, self.out_features, self.in_features)
