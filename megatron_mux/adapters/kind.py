"""The interface of an adapter kind: its section in tasks.yaml, and what every other room asks about it.

A kind is one file of this room with two classes: its section, an `AdapterSpec` that answers everything that is known
without weights, and the `TaskAdapter` that `attach` makes of it. `registry` lists the files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_mux.adapters.costs import Curve, Kept, Place, Sample, Work
from megatron_mux.adapters.modules import Module, Shape, Targets, match_targets, modules_of
from megatron_mux.section import FilePath, Refused, Section

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_mux.adapters.adapter import TaskAdapter
    from megatron_mux.adapters.host import Host


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor of an adapter.

    Attributes:
        shape: Of the whole tensor.
        layer: The layer that it belongs to; None: all layers share it.
        dim: The dimension that tensor ranks divide; None: each of them holds everything.
        trained: Whether it is trained; else it is fixed, and each stage that has a part of the adapter holds it.
        stored: Whether it is stored with the adapter; else it can be made again.
    """

    shape: tuple[int, ...]
    layer: int | None
    dim: int | None = None
    trained: bool = True
    stored: bool = True


class AdapterSpec(Section, ABC):
    """A kind of adapter: the fields of its `adapter` section, and methods that say what they amount to.

    Fields, spellings and defaults are those of peft's config class where peft has the kind.
    """

    peft_type: str
    """The method."""
    adapter_name_or_path: FilePath | None = None
    """Directory of a PEFT adapter to start from (`adapter_config.json`, `adapter_model.safetensors`); its fields are
    taken over, those given in the task must agree. None starts a fresh adapter."""

    in_peft: ClassVar[bool] = True
    """Whether peft has this kind."""

    acts_after_steps: ClassVar[bool] = False
    """Whether it changes its parameters between optimizer steps: see `TaskAdapter.after_step`."""

    free_with_weights: ClassVar[frozenset[str]] = frozenset()
    """Fields that may differ from those of the adapter that training starts from."""

    decisive: ClassVar[frozenset[str]] = frozenset()
    """Fields that decide what stored tensors mean: a task must agree in them with the adapter that it starts from."""

    from_weights: ClassVar[frozenset[str]] = frozenset()
    """Fields of a stored config that its weights or the backbone settle: not taken over."""

    initial_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields of a stored config that say how fresh weights were drawn, with the values that left the backbone alone."""

    @property
    def virtual_tokens(self) -> int:
        """Learned positions in front of every sequence."""
        return 0

    # -- which modules

    def targets(self, shape: Shape) -> Targets:
        """`target_modules`, or the default where the section names none."""
        given: Targets | None = getattr(self, "target_modules", None)
        return self.default_targets(shape) if given is None else given

    @abstractmethod
    def default_targets(self, shape: Shape) -> list[str]:
        """Names of the modules that it targets where the section names none: peft's choice if peft has the kind."""

    def modules(self, shape: Shape) -> list[Module]:
        """The modules that it targets, layer by layer.

        Raises:
            UserError: A target is not a module of the backbone, or not one that the kind can have.
        """
        found = match_targets(self.targets(shape), modules_of(shape))
        self.check_modules(found, shape)
        return found

    def check_modules(self, modules: Sequence[Module], shape: Shape) -> None:
        """Raise `UserError` if the kind cannot have one of these modules."""

    # -- its tensors, and their files

    @abstractmethod
    def tensors(self, shape: Shape) -> dict[str, AdapterTensor]:
        """Every tensor of the whole adapter, by its key in `adapter_model.safetensors`."""

    @abstractmethod
    def config(self, shape: Shape) -> dict[str, Any]:
        """The content of `adapter_config.json`."""

    # -- its cost

    @classmethod
    @abstractmethod
    def samples(cls) -> Sequence[Sample]:
        """The adapters whose seconds are measured for a profile: at least one size, better two, for each `curve`."""

    @abstractmethod
    def curve(self, modules: int) -> Curve | None:
        """Where a profile has the seconds of this adapter at a BaseOp.

        Args:
            modules: Number of modules of the BaseOp that it targets.

        Returns:
            None if it takes no seconds of its own: its `virtual_tokens` are counted with attention.
        """

    @abstractmethod
    def work(self, place: Place) -> Work:
        """The work of this adapter at a BaseOp, for profiles that are not measured."""

    @abstractmethod
    def kept(self, place: Place, modules: Sequence[Module], shape: Shape) -> Kept:
        """The memory of this adapter at a BaseOp.

        Args:
            place: The BaseOp.
            modules: Its modules that the adapter targets.
            shape: Of the backbone.
        """

    # -- at run time

    @abstractmethod
    def attach(
        self, host: Host, task: Any, total_steps: int, initial: Mapping[str, Tensor] | None
    ) -> TaskAdapter:
        """Make the adapter of a task on this rank.

        Args:
            host: The backbone's stage that it attaches to.
            task: The task: `name`, `training.seed`, and this section as `adapter`.
            total_steps: Optimizer steps that the task runs for.
            initial: Full tensors to start from, by key, already checked to be those of `tensors`; None makes a fresh
                adapter from the task's seed.
        """


# -- fields of peft that are not fields of ours

_NOT_YET = "is a peft field that megatron-mux does not support yet: leave it out"


def not_yet(*names: str, neutral: tuple[Any, ...] = (None, False)) -> dict[str, Refused]:
    """Fields of peft that are refused unless they have one of the `neutral` values."""
    return {name: Refused(_NOT_YET, neutral) for name in names}


def bookkeeping(*names: str) -> dict[str, Refused]:
    """Fields of peft that are accepted and ignored."""
    return {name: Refused("", always=True) for name in names}


COMMON_FIELDS: Mapping[str, Refused] = {
    **bookkeeping("peft_version", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
    **not_yet("modules_to_save", neutral=(None, [])),
    "task_type": Refused("only CAUSAL_LM is supported: leave it out", (None, "CAUSAL_LM")),
}
"""Fields of all of peft's config classes."""

TUNER_FIELDS: Mapping[str, Refused] = {
    **COMMON_FIELDS,
    **not_yet("exclude_modules", neutral=(None, [])),
    # How the backbone stores its weights: peft corrects a wrong value, we know it from the backbone.
    **bookkeeping("fan_in_fan_out"),
}
"""Fields of all of peft's config classes of kinds that target modules."""
