"""What an adapter costs at one BaseOp in seconds of compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class BaseOpWidths:
    """A BaseOp where an adapter acts.

    Attributes:
        in_features, out_features: Its widths.
    """

    in_features: float
    out_features: float


class Work(NamedTuple):
    """The forward pass of an adapter at a BaseOp; its backward pass takes twice as long.

    Attributes:
        flops: Floating-point operations of a row.
        moved: Values read and written for a row.
        weights: Values read and written whatever the number of rows.
    """

    flops: float
    moved: float
    weights: float = 0.0


class Curve(NamedTuple):
    """Where an adapter's seconds at a BaseOp stand in a profile.

    Attributes:
        name: Of the curves: those of one name are interpolated by size.
        size: What the seconds grow with, such as the rank; 0 if they are the same for all adapters of the kind.
    """

    name: str
    size: int = 0
