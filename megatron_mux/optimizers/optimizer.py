"""The interface of an optimizer of one task's adapter on this rank.

An optimizer steps a flat tensor of values by a flat tensor of gradients, both in the order of the flat parameters. A
device-side flag lets a step be skipped: values and states then stay as they are, whatever the gradients hold, and the
host does not wait. Shapes: n values of the flat parameters on this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Parameter(Protocol):
    """What an optimizer knows of a parameter: see `AdapterParameter`."""

    key: str
    full_shape: tuple[int, ...]
    dim: int | None
    index: Tensor | None

    def slice_of(self, full: Tensor) -> Tensor:
        """Copy the part of a full tensor that this rank holds."""


class ParamGroup(NamedTuple):
    """Neighbouring values of the flat parameters that are stepped alike.

    Attributes:
        first, last: First and one past the last value.
        weight_decay: Of these values.
        rate: Their learning rate as a multiple of the task's.
    """

    first: int
    last: int
    weight_decay: float = 0.0
    rate: float = 1.0


@dataclass(frozen=True, eq=False)
class ParamSlice:
    """One parameter in the flat parameters.

    Attributes:
        shape: Of the part that this rank holds.
        group: Where it is and how it is stepped.
        divided: The dimension that tensor ranks divide, not always evenly; None: each of them holds the whole tensor.
    """

    parameter: Parameter
    shape: tuple[int, ...]
    group: ParamGroup
    divided: int | None = None

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor, in its shape."""
        return flat[self.group.first : self.group.last].view(self.shape)


class Stored(NamedTuple):
    """A part of an optimizer's state as saves hold it.

    Attributes:
        tensor: What this rank holds.
        dim: The dimension that is divided over ranks; None: this rank holds everything.
        positions: `[local size of dim]` int64 positions along `dim` of what is held here.
    """

    tensor: Tensor
    full_shape: tuple[int, ...]
    dim: int | None
    positions: Tensor | None

    def slice_of(self, full: Tensor) -> Tensor:
        """The part of the whole tensor that this rank holds.

        Raises:
            ValueError: The tensor has another shape.
        """
        if tuple(full.shape) != self.full_shape:
            raise ValueError(
                f"expected an optimizer state of shape {self.full_shape}, got {tuple(full.shape)}"
            )
        if self.dim is None or self.positions is None:
            return full
        return full.index_select(self.dim, self.positions.to(full.device))


@dataclass(frozen=True, eq=False)
class ParamLayout:
    """The parameters that an optimizer steps.

    Attributes:
        values, gradients: `[n]` flat tensors.
        groups: Param groups that cover all parameters, as long as possible.
        group: Tensor ranks that hold the other parts of divided parameters; None: nothing is divided.
    """

    values: Tensor
    gradients: Tensor
    groups: Sequence[ParamGroup]
    slices: Sequence[ParamSlice]
    group: dist.ProcessGroup | None = None


class Options(NamedTuple):
    """Options of all optimizers, with the names of `transformers.TrainingArguments`."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


class Optimizer(ABC):
    """Steps the parameters of one task on this rank."""

    names: ClassVar[tuple[str, ...]]
    """Its spellings in `TrainingArguments.optim`, with equal results; the first is its name here."""
    states_per_value: ClassVar[int | None]
    """fp32 values of state for each value that it steps; None: their number depends on shapes."""
    splits: ClassVar[bool] = True
    """Whether values are stepped independently, so that parts of a parameter may be on ranks that do not meet."""
    launches: ClassVar[int]
    """Device launches of a step of a run of values, about."""
    traffic: ClassVar[float]
    """Bytes that such a step reads and writes for each value, about."""
    together: ClassVar[bool] = False
    """Whether `kernels.update.triton` can step it together with other tasks."""
    by_shape: ClassVar[bool] = False
    """Whether it steps parameters of one shape as one, instead of runs of neighbours."""
    at_once: ClassVar[int] = 0
    """The most values that it steps as one; 0: any number."""
    needs: ClassVar[str] = ""
    """The package that it imports; empty: none beside torch."""

    def __init__(self, layout: ParamLayout, options: Options) -> None:
        self.layout = layout
        self.options = options

    @abstractmethod
    def update(self, step: int, rate: float, skip: Tensor) -> None:
        """Step the values.

        Args:
            step: Steps done before this one.
            skip: Scalar fp32 on the device: unless it is zero, values and states stay as they are.
        """

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Every tensor that it keeps from step to step."""

    @abstractmethod
    def state(self) -> dict[str, dict[str, Stored]]:
        """What a save holds, by the parameter's key and by name."""

    @abstractmethod
    def load(self, param: ParamSlice, full: Mapping[str, Tensor]) -> None:
        """Restore a parameter's state.

        Args:
            full: The whole tensors that `state` gave on all ranks, by name.

        Raises:
            KeyError, ValueError: A tensor is missing or has another shape.
        """


class FlatOptimizer(Optimizer):
    """An optimizer that steps each value by itself; its states are flat tensors in the order of the flat parameters."""

    state_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, layout: ParamLayout, options: Options) -> None:
        super().__init__(layout, options)
        # Now, not in the first step: the task is refused if they do not fit.
        self.flats = {name: torch.zeros_like(layout.values) for name in self.state_names}

    @property
    def tensors(self) -> list[Tensor]:
        """See `Optimizer.tensors`."""
        return list(self.flats.values())

    def state(self) -> dict[str, dict[str, Stored]]:
        """See `Optimizer.state`."""
        found: dict[str, dict[str, Stored]] = {}
        for param in self.layout.slices if self.flats else ():
            p = param.parameter
            found[p.key] = {
                name: Stored(param.of(flat), p.full_shape, p.dim, p.index)
                for name, flat in self.flats.items()
            }
        return found

    def load(self, param: ParamSlice, full: Mapping[str, Tensor]) -> None:
        """See `Optimizer.load`."""
        for name, flat in self.flats.items():
            param.of(flat).copy_(param.parameter.slice_of(full[name]))
