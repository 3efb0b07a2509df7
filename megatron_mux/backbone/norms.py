"""Norms of a frozen backbone: torch's, and an RMS norm without a gradient for its weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_mux.kernels.pointwise import rms_norm


class FrozenRMSNorm(nn.Module):
    """RMS norm whose weight has no gradient."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


def make_norm(kind: str, hidden_size: int, eps: float) -> nn.Module:
    """The norm of a kind that a backbone's shape names: `RMSNorm` or `LayerNorm`."""
    return FrozenRMSNorm(hidden_size, eps) if kind == "RMSNorm" else nn.LayerNorm(hidden_size, eps)


class NormThenAdd(nn.Module):
    """Adds the norm of a sublayer's output to the hidden states, in place of Megatron's bias-dropout-add.

    Args:
        norm: The norm.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Megatron asks for the function first, then calls it: see `_add`."""
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        """`[T, 1, H]` output and its bias, if any, and the hidden states `[T, 1, H]` that it is added to."""
        hidden, bias = output
        normed: Tensor = self.norm(hidden if bias is None else hidden + bias)
        return residual + normed
