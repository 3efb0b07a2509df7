"""Where a task's adapter acts, and what it holds there; a config.json says it all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from megatron_mux.adapters import KINDS
from megatron_mux.adapters.targets import (
    feedforward_of,
    match_feedforward,
    match_targets,
    targets_of,
)
from megatron_mux.backbone.registry import read_shape
from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.base_ops import BASE_OPS, BaseOpName
from megatron_mux.tasks import TaskSpec

OPS: tuple[BaseOpName, ...] = BASE_OPS
_COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")


class Catalogue(Protocol):
    """The part of `BackboneInfo` that is needed here."""

    @property
    def shape(self) -> Any:
        """Sizes of the backbone."""

    @property
    def module_paths(self) -> Sequence[str]:
        """Full paths of all modules within BaseOps, layer by layer."""

    @property
    def layer_modules(self) -> Mapping[BaseOpName, Sequence[str]]:
        """For each BaseOp, the paths within a layer of its modules."""


@dataclass(frozen=True)
class Site:
    """A task's adapter at one BaseOp of one layer.

    Attributes:
        layer: Index of the layer.
        op: Which BaseOp.
        kind: The adapter's `peft_type`; `LORA_DROPOUT` for LoRA with dropout.
        size: Rank (of all modules of the BaseOp together), bottleneck size, virtual tokens; 0 where there is none.
        modules: Of the BaseOp, those that the adapter acts on.
        width: Outputs of these modules, where the BaseOp has several: only some of its columns are theirs; else 0.
        scales_input: Whether it multiplies the BaseOp's input (IA3 on feed-forward modules).
    """

    layer: int
    op: BaseOpName
    kind: str
    size: int
    modules: int = 1
    width: int = 0
    scales_input: bool = False


def sites_of(adapter: Any, targets: Sequence[str], info: Catalogue) -> tuple[Site, ...]:
    """Where an adapter acts, by layer.

    Args:
        adapter: The `adapter` section of a task.
        targets: Full paths of the modules that it targets.
        info: The backbone.
    """
    per_layer = sum(len(modules) for modules in info.layer_modules.values())
    wanted = set(targets)
    found: list[Site] = []
    for layer in range(info.shape.layers):
        paths = info.module_paths[layer * per_layer : (layer + 1) * per_layer]
        at = 0
        for op in OPS:
            own = [path for path in paths[at : at + len(info.layer_modules[op])] if path in wanted]
            at += len(info.layer_modules[op])
            if own and (adapter.peft_type != "PREFIX_TUNING" or op == "linear_qkv"):
                kind = _kind(adapter, len(own))
                several = len(info.layer_modules[op]) > 1
                width = sum(info.shape.module_shape(path)[0] for path in own) if several else 0
                found.append(Site(layer, op, *kind, len(own), width, bool(_scaled(adapter, own, info))))
    return tuple(found)


def _scaled(adapter: Any, paths: Sequence[str], info: Catalogue) -> list[str]:
    """Of some modules, those whose input IA3 multiplies."""
    if adapter.peft_type != "IA3":
        return []
    return match_feedforward(feedforward_of(adapter, info.shape), paths)


def _kind(adapter: Any, modules: int) -> tuple[str, int]:
    kind: str = adapter.peft_type
    if kind == "LORA":
        return ("LORA_DROPOUT" if adapter.lora_dropout else kind), adapter.r * modules
    if kind == "BOTTLENECK":
        return kind, adapter.bottleneck_size
    if kind == "PREFIX_TUNING":
        return kind, adapter.num_virtual_tokens
    return kind, 0


@dataclass(frozen=True)
class Configured:
    """A `Catalogue` of a config.json alone: no weight has to be there."""

    shape: BackboneShape

    @property
    def layer_modules(self) -> Mapping[BaseOpName, tuple[str, ...]]:
        """See `BackboneShape.layer_modules`."""
        return self.shape.layer_modules

    @property
    def module_paths(self) -> tuple[str, ...]:
        """See `BackboneShape.module_paths`."""
        return self.shape.module_paths

    @classmethod
    def read(cls, path: Path) -> Configured:
        """The backbone of a directory's config.json, or of that file by itself.

        Raises:
            UserError: Its family is not one of ours, or it asks for what is not done.
        """
        return cls(read_shape(path))


@dataclass(frozen=True)
class TaskAdapters:
    """A task's adapter, for memory.

    Attributes:
        name: The task's.
        optimizer: `adamw` or `sgd`.
        sites: Where it acts.
        divided: `[L]` values of each layer that tensor ranks divide.
        copied: `[L]` values of each layer that each of them has.
    """

    name: str
    optimizer: str
    sites: tuple[Site, ...]
    divided: tuple[float, ...]
    copied: tuple[float, ...]

    @classmethod
    def of(cls, spec: TaskSpec, info: Catalogue) -> TaskAdapters:
        """Of a validated task on a backbone.

        Raises:
            UserError: It targets no module of the backbone.
        """
        shape = info.shape
        targets = match_targets(targets_of(spec.adapter, shape), info.module_paths)
        divided, copied = [0.0] * shape.layers, [0.0] * shape.layers
        tensors = KINDS[spec.adapter.peft_type].tensor_shapes(spec.adapter, targets, shape)
        place = _places(info)
        for key, size in tensors.items():
            path, suffix = _parted(key, place)
            if path is None:  # a prefix: one tensor for all layers, whole on every tensor rank
                for layer in range(shape.layers):
                    copied[layer] += math.prod(size) / shape.layers
                continue
            layer, op = place[path]
            values = divided if _is_divided(suffix, size, op) else copied
            values[layer] += math.prod(size)
        optimizer = "sgd" if spec.training.optim == "sgd" else "adamw"
        return cls(spec.name, optimizer, sites_of(spec.adapter, targets, info), tuple(divided), tuple(copied))

    @property
    def virtual_tokens(self) -> int:
        """In front of each sequence."""
        return max((site.size for site in self.sites if site.kind == "PREFIX_TUNING"), default=0)

    @cached_property
    def by_layer(self) -> Mapping[int, tuple[Site, ...]]:
        """The sites of each layer that has any."""
        found: dict[int, tuple[Site, ...]] = {}
        for site in self.sites:
            found[site.layer] = (*found.get(site.layer, ()), site)
        return found

    def values(self, layers: range, tensor: int) -> float:
        """How many values one of so many tensor ranks has of these layers."""
        return sum(self.divided[i] / tensor + self.copied[i] for i in layers)


def _places(info: Catalogue) -> dict[str, tuple[int, BaseOpName]]:
    """Layer and BaseOp of each module."""
    own = [(op, path) for op in OPS for path in info.layer_modules[op]]
    return {path: (i // len(own), own[i % len(own)][0]) for i, path in enumerate(info.module_paths)}


def _parted(key: str, place: Mapping[str, Any]) -> tuple[str | None, str]:
    """The module and the rest of a tensor's name; no module if it belongs to none."""
    name = key.removeprefix("base_model.model.")
    path = name
    while path and path not in place:
        path = path.rpartition(".")[0]
    return (path, name[len(path) + 1 :]) if path else (None, name)


def _is_divided(suffix: str, shape: Sequence[int], op: BaseOpName) -> bool:
    """Whether tensor ranks divide a tensor: along the columns of a column-parallel BaseOp, or the inputs of others."""
    column = op in _COLUMN_PARALLEL
    if suffix.startswith("adapter_"):
        return False  # a bottleneck sees the whole output
    if suffix.startswith("lora_"):
        return ("lora_B" in suffix) == column
    if suffix.startswith("ia3"):
        return (shape[0] != 1) == column
    return True  # a difference of the weight
