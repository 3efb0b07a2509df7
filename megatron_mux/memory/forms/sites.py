"""Where a task's adapter acts, and what it holds there; a config.json says it all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_mux.adapters.ia3 import IA3Spec
from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.modules import Module, Shape
from megatron_mux.base_ops import BASE_OPS, BaseOpName
from megatron_mux.tasks import TaskSpec

OPS: tuple[BaseOpName, ...] = BASE_OPS


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


def sites_of(adapter: AdapterSpec, shape: Shape) -> tuple[Site, ...]:
    """Where an adapter acts, by layer.

    Args:
        adapter: The `adapter` section of a task.
        shape: Of the backbone.
    """
    at: dict[tuple[int, BaseOpName], list[Module]] = {}
    for module in adapter.modules(shape):
        at.setdefault((module.layer, module.op), []).append(module)
    found: list[Site] = []
    for (layer, op), own in at.items():
        several = len(shape.layer_modules[op]) > 1
        width = sum(module.out_features for module in own) if several else 0
        scaled = isinstance(adapter, IA3Spec) and bool(adapter.scales_input(own, shape))
        found.append(Site(layer, op, *_kind(adapter, len(own)), len(own), width, scaled))
    return tuple(found)


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
    def of(cls, spec: TaskSpec, shape: Shape) -> TaskAdapters:
        """Of a validated task on a backbone.

        Raises:
            UserError: It targets no module of the backbone.
        """
        divided, copied = [0.0] * shape.layers, [0.0] * shape.layers
        for tensor in spec.adapter.tensors(shape).values():
            size = math.prod(tensor.shape)
            if tensor.layer is None:
                copied = [values + size / shape.layers for values in copied]
            else:
                (copied if tensor.dim is None else divided)[tensor.layer] += size
        optimizer = "sgd" if spec.training.optim == "sgd" else "adamw"
        return cls(spec.name, optimizer, sites_of(spec.adapter, shape), tuple(divided), tuple(copied))

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
