"""Where a task's adapter acts, and what it holds there; a config.json says it all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_mux.adapters.costs import Curve, Kept, Place
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
        curve: Where a profile has its seconds; None: it takes none.
        kept: Its memory.
    """

    layer: int
    op: BaseOpName
    curve: Curve | None
    kept: Kept = Kept()  # noqa: RUF009  (frozen)


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
        share = sum(module.out_features for module in own) if several else 0
        place = Place(op, shape.in_features(op), shape.out_features(op), len(own), share)
        found.append(Site(layer, op, adapter.curve(len(own)), adapter.kept(place, own, shape)))
    return tuple(found)


@dataclass(frozen=True)
class TaskAdapters:
    """A task's adapter, for memory.

    Attributes:
        name: The task's.
        optimizer: `adamw` or `sgd`.
        sites: Where it acts.
        divided: `[L]` values of each layer that tensor ranks divide.
        copied: `[L]` values of each layer that each of them has.
        virtual_tokens: In front of each sequence.
        fixed: Values that are not trained, on each rank with a part of the adapter.
    """

    name: str
    optimizer: str
    sites: tuple[Site, ...]
    divided: tuple[float, ...]
    copied: tuple[float, ...]
    virtual_tokens: int = 0
    fixed: float = 0.0

    @classmethod
    def of(cls, spec: TaskSpec, shape: Shape) -> TaskAdapters:
        """Of a validated task on a backbone.

        Raises:
            UserError: It targets no module of the backbone.
        """
        adapter = spec.adapter
        divided, copied, fixed = [0.0] * shape.layers, [0.0] * shape.layers, 0.0
        for tensor in adapter.tensors(shape).values():
            size = math.prod(tensor.shape)
            if not tensor.trained:
                fixed += size
            elif tensor.layer is None:
                copied = [values + size / shape.layers for values in copied]
            else:
                (copied if tensor.dim is None else divided)[tensor.layer] += size
        optimizer = "sgd" if spec.training.optim == "sgd" else "adamw"
        sites = sites_of(adapter, shape)
        return cls(spec.name, optimizer, sites, tuple(divided), tuple(copied), adapter.virtual_tokens, fixed)

    @cached_property
    def by_layer(self) -> Mapping[int, tuple[Site, ...]]:
        """The sites of each layer that has any."""
        found: dict[int, tuple[Site, ...]] = {}
        for site in self.sites:
            found[site.layer] = (*found.get(site.layer, ()), site)
        return found

    def values(self, layers: range, tensor: int) -> float:
        """Number of trained values that one of so many tensor ranks has of these layers."""
        return sum(self.divided[i] / tensor + self.copied[i] for i in layers)

    def fixed_values(self, layers: range) -> float:
        """Number of values that are not trained, on a rank with these layers."""
        return self.fixed if any(layer in self.by_layer for layer in layers) else 0.0
