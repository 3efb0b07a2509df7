"""Rotary embedding by each token's position. Shapes: T tokens, D head size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_mux.backbone.shape import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """`[D / 2]` fp32, computed as transformers does, operation by operation, so that angles agree to the last bit."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between interpolated (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    share = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share) * stretched / rope.factor + share * stretched
    medium = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(medium, between, stretched)


def turns(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[T, 1, D / 2]` of each token's angles, computed in fp32 whatever `dtype` they are wanted in."""
    angles = (positions.float().unsqueeze(1) * frequencies).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
