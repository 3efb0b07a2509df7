"""A tensor of a task's adapter on a rank: the part of it that the rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(eq=False)
class AdapterParameter:
    """A tensor of a task's adapter, or the part of it that this rank holds.

    Attributes:
        key: Its exact name in `adapter_model.safetensors`.
        value: The local part.
        full_shape: Shape of the whole tensor, independent of ranks.
        dim: The dimension that is divided over ranks, None if this rank holds everything.
        index: `[local size of dim]` int64 global positions along `dim` of what is held here; None without `dim`.
        partial: Whether the local gradient must be summed over tensor ranks to be the gradient.
        owner: Whether this rank counts the part in norms and saves it: each element of the full tensor has exactly
            one owner over tensor and pipeline ranks.
        decay: Whether weight decay applies (not to biases and masks).
        of_stage: Whether the owner is on this pipeline stage.
    """

    key: str
    value: nn.Parameter
    full_shape: tuple[int, ...]
    dim: int | None = None
    index: Tensor | None = None
    partial: bool = False
    owner: bool = True
    decay: bool = True
    of_stage: bool = True

    @property
    def precedence(self) -> tuple[bool, ...]:
        """Its place in `FlatParams`: the lowest comes first."""
        return not self.of_stage, not self.partial, not self.decay, not self.owner

    def slice_of(self, full: Tensor) -> Tensor:
        """Copy the part of `full` that this rank holds.

        Args:
            full: A tensor of `full_shape`: the value itself, an optimizer moment, a mask.
        """
        if tuple(full.shape) != self.full_shape:
            raise ValueError(f"{self.key}: expected shape {self.full_shape}, got {tuple(full.shape)}")
        if self.dim is None or self.index is None:
            return full.clone()
        return full.index_select(self.dim, self.index.to(full.device))
