"""What an adapter costs at one BaseOp: seconds of compute, and bytes that it keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_mux.base_ops import COLUMN_PARALLEL, BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.shape import BackboneShape

if TYPE_CHECKING:
    from megatron_mux.adapters.kind import AdapterSpec

Where = Literal["rows", "all", "columns"]
"""The part of a tensor that a tensor rank has: all columns of its own rows (with sequence parallelism; else of all
rows), the whole of it, or its own columns of all rows."""


@dataclass(frozen=True)
class Place:
    """A BaseOp where an adapter acts.

    Attributes:
        op: Which BaseOp.
        in_features, out_features: Its widths.
        modules: Number of its modules that the adapter targets.
        share: Outputs of these modules, if the BaseOp has several modules; 0 if it is one module.
    """

    op: BaseOpName
    in_features: float
    out_features: float
    modules: int = 1
    share: int = 0

    @property
    def column_parallel(self) -> bool:
        """Whether tensor ranks divide its output; else they divide its input."""
        return self.op in COLUMN_PARALLEL


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


class Row(NamedTuple):
    """A tensor that is kept for each row of a task.

    Attributes:
        what: It is, for people.
        where: The part of it that a tensor rank has.
        width: Values of a row.
        size: Bytes of a value; None: as the backbone computes.
    """

    what: str
    where: Where
    width: float
    size: int | None = None


@dataclass(frozen=True)
class Kept:
    """The memory of an adapter at a BaseOp in one layer, besides its parameters and what the backbone keeps anyway.

    Attributes:
        input: Whether its backward pass needs the BaseOp's input.
        output: Whether its backward pass needs the BaseOp's output as it was before the adapter.
        replaces_input: Whether it changes the input of a row-parallel BaseOp: other adapters need the changed one.
        rows: What each row of the task keeps.
        latent: Columns that it needs of a latent tensor, which all rows of a micro-batch keep, as wide as any of its
            tasks needs: that of low-rank terms, or with `output` that of bottlenecks.
        scratch: Values in fp32 that come and go with a backward pass and with an optimizer step, divided over tensor
            ranks.
        multiplied: Values of a row, of the BaseOp's input or output, that it multiplies in the parameters' precision:
            its backward pass has three such tensors at a time.
        grouped: What it is instead where kernels compute all tasks at once; None: the same.
    """

    input: bool = False
    output: bool = False
    replaces_input: bool = False
    rows: tuple[Row, ...] = ()
    latent: int = 0
    scratch: float = 0.0
    multiplied: float = 0.0
    grouped: Kept | None = None
