"""The interface of an adapter kind: its section in tasks.yaml, and what every other package asks about it.

A kind is one file of this package with two classes: its section, an `AdapterSpec` that answers everything that is known
without weights, and the `TaskAdapter` that `attach` makes of it. `registry` lists the files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from torch import Tensor

from megatron_mux.adapters.costs import BaseOpWidths, Curve, Work
from megatron_mux.adapters.peft_fields import NOT_STORED, PeftField
from megatron_mux.adapters.selection import within_layers, without
from megatron_mux.adapters.targets import ALL_LINEAR, Targets, match_targets, short_names
from megatron_mux.adapters.tensors import AdapterTensor, of_backbone, tensor_key
from megatron_mux.adapters.vocabulary_fields import OwnMatrix
from megatron_mux.base_ops import BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.section import FilePath, Section
from megatron_mux.shape import BackboneShape, Module

if TYPE_CHECKING:
    from megatron_mux.adapters.adapter import TaskAdapter
    from megatron_mux.adapters.host import Host


class AdapterSpec(Section, ABC):
    """A kind of adapter: the fields of its `adapter` section, and methods that say what they amount to.

    Fields, spellings and defaults are those of peft's config class where peft has the kind.
    """

    peft_type: str
    """The method."""
    adapter_name_or_path: FilePath | None = None
    """Directory of a PEFT adapter to start from (`adapter_config.json`, `adapter_model.safetensors`); its fields are
    taken over, those given in the task must agree. None starts a fresh adapter."""

    refused: ClassVar[Mapping[str, PeftField]]
    """The other fields of peft's config class."""

    run_time: ClassVar[type[TaskAdapter]]
    """The class of the adapters that `attach` makes."""

    in_peft: ClassVar[bool] = True
    """Whether peft has this kind."""

    acts_in_steps: ClassVar[bool] = False
    """Whether it acts in steps beside its gradients: `penalty`, `after_step` and `rollback_after` of its adapters."""

    free_with_weights: ClassVar[frozenset[str]] = frozenset()
    """Fields that may differ from those of the adapter that training starts from; in all others they must agree."""

    @classmethod
    def kind(cls) -> str:
        """The one value that `peft_type` takes."""
        (name,) = get_args(cls.model_fields["peft_type"].annotation)
        return str(name)

    @property
    def virtual_tokens(self) -> int:
        """Learned positions in front of every sequence."""
        return 0

    @property
    def begins_as_backbone(self) -> bool:
        """Whether a new adapter adds exact zeros to what the backbone computes."""
        return False

    # -- which modules

    def targets(self, shape: BackboneShape) -> Targets:
        """`target_modules`, or the default where the section names none."""
        given: Targets | None = getattr(self, "target_modules", None)
        return self.default_targets(shape) if given is None else given

    def default_targets(self, shape: BackboneShape) -> list[str]:
        """Names of the modules that it targets where the section names none: peft's choice if peft has the kind."""
        return list(shape.names.targets.lora)

    def modules(self, shape: BackboneShape) -> list[Module]:
        """The modules that it targets, layer by layer.

        Raises:
            UserError: A target is not a module of the backbone, or not one that the kind can have.
        """
        targets, strict = self.targets(shape), self.adapter_name_or_path is None
        modules = match_targets(targets, shape.modules)
        layers, pattern = (getattr(self, name, None) for name in ("layers_to_transform", "layers_pattern"))
        modules = within_layers(layers, pattern, targets, modules, strict)
        return without(getattr(self, "exclude_modules", None), modules, strict)

    # -- its tensors, and their files

    def shared_tensors(self, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """The tensors that are not one module's, by their key in `adapter_model.safetensors`."""
        return {}

    def key_path(self, module: Module) -> str:
        """The path that the keys of a module's tensors begin with."""
        return module.path

    def module_tensors(self, module: Module, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """The tensors of a module, by the end of their key, which begins with the module's path.

        A dimension that tensor ranks divide is as long as the module's output if the module is column-parallel, and as
        its input if not.
        """
        return {}

    def own_rows(self, shape: BackboneShape) -> tuple[OwnMatrix, ...]:
        """The rows of the embedding and of the output layer that it trains in place of the backbone's.

        Raises:
            UserError: They cannot be trained.
        """
        return ()

    def tensors(self, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """Every tensor of the whole adapter, by its key in `adapter_model.safetensors`.

        Raises:
            UserError: It targets what it cannot have.
            ValueError: The kind divides a tensor otherwise than `module_tensors` allows.
        """
        tensors = dict(self.shared_tensors(shape))
        for module in self.modules(shape):
            width = module.out_features if module.column_parallel else module.in_features
            for name, tensor in self.module_tensors(module, shape).items():
                key = tensor_key(self.key_path(module), name)
                if module.replicated:
                    tensor = replace(tensor, dim=None, on_output=False)
                if tensor.dim is not None and tensor.shape[tensor.dim] != width:
                    raise ValueError(f"{key}: tensor ranks divide {width} features, not {tensor}")
                tensors[key] = tensor
        for matrix in self.own_rows(shape):
            layer, dim = (matrix.layers(shape)[0], 0) if matrix.tokens is None else (None, None)
            tensors[matrix.key] = AdapterTensor(matrix.size(shape), layer, of_backbone, dim)
        return tensors

    def is_alike(self, shape: BackboneShape, layers: range) -> bool:
        """Whether each of these layers has tensors of the same shapes in the same places, or none has any."""
        paths: dict[int, list[str]] = {layer: [] for layer in layers}
        for module in self.modules(shape):
            if module.layer in paths:
                paths[module.layer].append(module.op)
        for tensor in self.tensors(shape).values():
            if tensor.layer in paths:
                paths[tensor.layer].append(f"{tensor.shape} {tensor.dim} {tensor.trained}")
        return len({tuple(sorted(of_layer)) for of_layer in paths.values()}) == 1

    def in_files(self, tensors: Mapping[str, Tensor], shape: BackboneShape) -> dict[str, Tensor]:
        """The tensors as `adapter_model.safetensors` has them, from those of `tensors`."""
        return dict(tensors)

    def from_files(self, tensors: Mapping[str, Tensor], shape: BackboneShape) -> dict[str, Tensor]:
        """The inverse of `in_files`; what is not of a file's form stays as it is."""
        return dict(tensors)

    def config(self, shape: BackboneShape) -> dict[str, Any]:
        """The content of `adapter_config.json`, keys in order: `all-linear` is spelled out."""
        fields = {name: f.default for name, f in self.refused.items() if f.default is not NOT_STORED}
        fields |= {name: getattr(self, name) for name in type(self).model_fields}
        del fields["adapter_name_or_path"]
        if "fan_in_fan_out" in fields:
            fields["fan_in_fan_out"] = shape.names.transposed
        if "target_modules" in fields:
            targets = self.targets(shape)
            every = isinstance(targets, str) and targets.lower() == ALL_LINEAR
            fields["target_modules"] = (
                short_names(m for m in shape.modules if not m.experts) if every else targets
            )
        return dict(sorted(fields.items()))

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

    def curve_of(self, modules: Sequence[Module]) -> Curve | None:
        """The same, of modules that are known by name."""
        return self.curve(len(modules))

    @abstractmethod
    def work(self, place: BaseOpWidths) -> Work:
        """The work of this adapter at a BaseOp, for profiles that are not measured."""

    # -- at run time

    def freezes_after(self, total_steps: int) -> int | None:
        """Optimizer steps, of `total_steps`, after which a part of the adapter is frozen; None: none ever is."""
        return None

    def attach(
        self, host: Host, task: Any, total_steps: int, initial: Mapping[str, Tensor] | None
    ) -> TaskAdapter:
        """Make the adapter of a task on this rank.

        Args:
            task: The task: `name`, `training.seed`, and this section as `adapter`.
            initial: Full tensors to start from, by key, already checked to be those of `tensors`; None makes a fresh
                adapter from the task's seed.
        """
        return self.run_time(host, task, total_steps, initial)


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
