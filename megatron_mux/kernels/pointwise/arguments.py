"""What element-wise operations are told: norms, and how heads follow each other.

Shapes: H hidden, D features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """A frozen norm over the last dimension.

    Attributes:
        weight: `[H]`.
        bias: `[H]`, or None.
        eps: Added to the mean square.
        centred: Whether it subtracts the mean, as a LayerNorm does; else it is an RMS norm.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool


JoinedNorms = tuple[Norm | None, Norm | None]
"""The norm of what is added, and that of the sum."""


@dataclass(frozen=True)
class Heads:
    """How the heads of a row follow each other, and what is done to them.

    Attributes:
        size: D, features of a head.
        queries: Query heads of a group.
        keyed: Whether a key head and a value head follow the query heads of each group.
        first: The first feature that is rotated.
        interleaved: Whether the features of a rotated pair are neighbours; they come out in halves.
        weights: `[D]` weights of the RMS norms of queries and keys, or None twice.
        eps: Of those norms.
    """

    size: int
    queries: int
    keyed: bool = True
    first: int = 0
    interleaved: bool = False
    weights: tuple[Tensor | None, Tensor | None] = (None, None)
    eps: float = 0.0
