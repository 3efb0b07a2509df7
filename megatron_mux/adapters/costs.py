"""What an adapter costs at one BaseOp in seconds of compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_mux.base_ops import BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.shape import BackboneShape

if TYPE_CHECKING:
    from megatron_mux.adapters.kind import AdapterSpec


@dataclass(frozen=True)
class Place:
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


@dataclass(frozen=True)
class Sample:
    """An adapter whose seconds are measured for a profile.

    Attributes:
        section: Makes the section that targets all modules of a BaseOp, from the BaseOp and the modules' paths within a
            layer.
        paired: Whether two of them are measured together, for equation 3's utilisation.
    """

    section: Callable[[BaseOpName, Sequence[str]], AdapterSpec]
    paired: bool = False

    def at(self, op: BaseOpName, shape: BackboneShape) -> AdapterSpec | None:
        """The section for a BaseOp of a backbone; None where the backbone cannot have it, so that no task does."""
        section = self.section(op, [linear.path for linear in shape.names.ops[op]])
        return section if accepted(section, shape) else None


def accepted(section: AdapterSpec, shape: BackboneShape) -> bool:
    """Whether the modules that a section targets can have its adapters."""
    try:
        section.modules(shape)
    except UserError:
        return False
    return True
