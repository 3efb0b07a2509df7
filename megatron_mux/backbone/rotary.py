"""Rotary embedding by each token's position. Shapes: T tokens, D rotated features of a head."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_mux.backbone.shape import Rope
from megatron_mux.kernels.segment import Segment

Angles = tuple[Tensor, Tensor]
"""Cosine and sine `[T, 1, D / 2]` of each token's angles."""


class Rotary:
    """One rotary embedding on a device.

    Args:
        rope: Its settings.
        head_dim: Width of a head.
        device: Where the angles are computed.
    """

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self.rope = rope
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._long = (
            inverse_frequencies(rope, head_dim, long=True).to(device) if rope.kind == "longrope" else None
        )

    def angles(self, positions: Tensor, segments: Sequence[Segment], dtype: torch.dtype) -> Angles:
        """The angles of a micro-batch's tokens, computed in fp32.

        Args:
            positions: `[T]` int64.
            segments: The sequences, in row order: `longrope` depends on the length of each.
            dtype: Of the result.
        """
        angles = (positions.float().unsqueeze(1) * self._of_rows(segments, positions.shape[0])).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if self.rope.attention_factor != 1.0:
            cos, sin = cos * self.rope.attention_factor, sin * self.rope.attention_factor
        return cos.to(dtype), sin.to(dtype)

    def _of_rows(self, segments: Sequence[Segment], rows: int) -> Tensor:
        """Frequencies that broadcast against `[T, D / 2]`."""
        if self._long is None:
            return self._frequencies
        is_long = [segment.positions > self.rope.original_max_positions for segment in segments]
        if not any(is_long):
            return self._frequencies
        if all(is_long):
            return self._long
        ends = [*(segment.start for segment in segments[1:]), rows]  # padding goes with the last
        found = [
            (self._long if long else self._frequencies).expand(end - segment.start, -1)
            for segment, long, end in zip(segments, is_long, ends, strict=True)
        ]
        return torch.cat(found)


def inverse_frequencies(rope: Rope, head_dim: int, long: bool = False) -> Tensor:
    """`[D / 2]` fp32, computed as transformers does, operation by operation, so that angles agree to the last bit.

    Args:
        rope: The settings.
        head_dim: Width of a head.
        long: For `longrope`: of sequences beyond the original positions.
    """
    width = int(head_dim * rope.rotated_share)
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    if rope.kind == "longrope":
        factors = torch.tensor(rope.long_factors if long else rope.short_factors, dtype=torch.float32)
        return 1.0 / (factors * rope.theta**exponents)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Stretch long wavelengths, keep short ones, interpolate between (Llama 3.1)."""
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
