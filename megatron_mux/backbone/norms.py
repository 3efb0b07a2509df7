"""Norms of a frozen backbone, without gradients of their weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from megatron_mux.kernels.pointwise.arguments import Norm
from megatron_mux.kernels.pointwise.functions import normalise

NormKind = Literal["RMSNorm", "LayerNorm"]


class FrozenNorm(nn.Module):
    """A norm over the last dimension.

    Args:
        kind: An RMS norm, or a LayerNorm, which has a bias.
        hidden_size: Features.
        eps: Added to the mean square.
    """

    bias: nn.Parameter | None

    def __init__(self, kind: NormKind, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.centred = eps, kind == "LayerNorm"
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(hidden_size)) if self.centred else None)

    @property
    def frozen(self) -> Norm:
        """What kernels need of it."""
        return Norm(self.weight, self.bias, self.eps, self.centred)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return normalise(x, self.frozen)


class OutputNorm(nn.Module):
    """Holds the norm of a sublayer's output, in place of Megatron's bias-dropout-add: see `layer.add`.

    Args:
        norm: The norm.
    """

    def __init__(self, norm: FrozenNorm) -> None:
        super().__init__()
        self.norm = norm
