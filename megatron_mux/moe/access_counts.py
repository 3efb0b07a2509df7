"""Counting which experts the rows of training steps select: on the device, so that no step waits for the host.

Shapes: R rows of a rank in a layer, K experts of a row, E experts, L layers with experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.batch.packed_batch import active
from megatron_mux.moe.access_profile import AccessProfile, ModelIdentity
from megatron_mux.moe.entries import Floats, Ints

if TYPE_CHECKING:
    from megatron_mux.backbone.experts.router import Routes
    from megatron_mux.backbone.model import Backbone
    from megatron_mux.runtime import Parallel

_EVERY = 8
"""Pairs of experts are counted in one of so many rows: enough to know how often experts are selected together."""


@dataclass(frozen=True)
class Access:
    """What the rows of some steps selected, of all ranks together.

    Attributes:
        layers: [L] indices of the layers.
        by_task: Task to [L][E] rows that selected each expert.
        together: [L][E][E] rows, of a sample, that selected both experts; None if nobody asked.
    """

    layers: tuple[int, ...]
    by_task: Mapping[str, Ints]
    together: Ints | None = None

    @property
    def selected(self) -> Ints:
        """[L][E] rows of all tasks that selected each expert."""
        return np.asarray(sum(self.by_task.values()))

    def merged(self, other: Access) -> Access:
        """What both counted."""
        names = dict.fromkeys((*self.by_task, *other.by_task))
        by_task = {
            name: np.asarray(sum(access.by_task[name] for access in (self, other) if name in access.by_task))
            for name in names
        }
        pairs = None
        if self.together is not None and other.together is not None:
            pairs = self.together + other.together
        return Access(self.layers, by_task, pairs)

    def scaled(self, factor: float) -> Access:
        """So many times what was counted, rounded."""
        by_task = {name: np.rint(rows * factor).astype(np.int64) for name, rows in self.by_task.items()}
        pairs = None if self.together is None else np.rint(self.together * factor).astype(np.int64)
        return Access(self.layers, by_task, pairs)

    def probabilities(self, selected: Ints, top_k: int) -> Floats:
        """[L][E] probability that a row selects an expert; zeros without rows."""
        return np.asarray(selected * top_k / np.maximum(selected.sum(axis=1, keepdims=True), 1))

    def profile(self, model: ModelIdentity) -> AccessProfile:
        """The profile of what was counted; every layer must have rows."""
        rows = self.selected
        return AccessProfile.model_validate(
            {
                "model": model,
                "top_k": model.top_k,
                "tokens": int(rows[0].sum()) // model.top_k,
                "layers": self.layers,
                "access": self.probabilities(rows, model.top_k).tolist(),
                "coactivation": None if self.together is None else self.together.tolist(),
            }
        )


class AccessCounts:
    """Counts of a rank's stages. Rows that are computed again in the backward pass count once; padding never does.

    Attributes:
        cpu_s: Seconds of CPU time that counting took so far, in the thread that runs steps.
    """

    def __init__(self, stages: Iterable[Backbone]) -> None:
        self.cpu_s = 0.0
        self._counts: dict[int, _LayerCounts] = {}
        self._counting = False
        for stage in stages:
            experts = stage.shape.experts
            assert experts is not None
            self.layers = experts.layers(stage.shape.layers)
            self._experts, self._device = experts.count, stage.device
            for index, layer in stage.expert_layers():
                if layer.router is not None:
                    first = layer.tp_rank if layer.sequence_parallel else 0
                    self._counts[index] = _LayerCounts(experts.count, stage.device, first)
                    layer.observe = partial(self._observe, self._counts[index])

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which rows count."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def _observe(self, counts: _LayerCounts, routes: Routes, slots: Tensor) -> None:
        if self._counting:
            began = time.thread_time()
            counts.add(routes.experts, slots)
            self.cpu_s += time.thread_time() - began

    def take(self, parallel: Parallel, slots: Mapping[str, int], pairs: bool = False) -> Access:
        """Sum over all ranks what was counted since the last call, and begin anew. Every rank calls it.

        Args:
            pairs: Whether to sum what was selected together, too.
        """
        shape = len(self.layers), max(slots.values(), default=-1) + 1, self._experts
        selected = torch.zeros(shape, dtype=torch.int64, device=self._device)
        together = torch.zeros(
            (shape[0] if pairs else 0, self._experts, self._experts), dtype=torch.int64, device=self._device
        )
        for place, layer in enumerate(self.layers):
            if layer in self._counts:
                counts = self._counts[layer]
                known = counts.selected[: shape[1]]
                selected[place, : len(known)] = known
                if pairs:
                    together[place] = counts.together
                counts.clear()
        if parallel.world_size > 1:
            dist.all_reduce(selected)
            if pairs:
                dist.all_reduce(together)
        numbers = selected.cpu().numpy()
        by_task = {name: numbers[:, slot] for name, slot in slots.items()}
        return Access(self.layers, by_task, together.cpu().numpy() if pairs else None)


class _LayerCounts:
    """What is counted in one layer on this rank.

    Args:
        part: Which of the equal parts of a micro-batch's rows the layer gets: its tensor rank's.

    Attributes:
        selected: `[slots, E]` int64.
        together: `[E, E]` int64.
    """

    def __init__(self, experts: int, device: torch.device, part: int) -> None:
        self._part = part
        self.selected = torch.zeros(1, experts, dtype=torch.int64, device=device)
        self.together = torch.zeros(experts, experts, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._rows = 0

    def add(self, experts: Tensor, slots: Tensor) -> None:
        """Count the rows of a pass.

        Args:
            experts: `[R, K]` int64.
            slots: `[R]` int64; rows whose slot no task has are not counted as some task's.
        """
        groups = active().groups
        if not groups.rows or not len(experts):
            return
        used = groups.rows[-1][1] - self._part * len(experts)  # padding is at the end
        if used <= 0:
            return
        missing = max(groups.slots) + 1 - len(self.selected)
        if missing > 0:
            self.selected = torch.cat(
                (self.selected, self.selected.new_zeros(missing, self.selected.shape[1]))
            )
        experts, slots = experts[:used], slots[:used]
        most, wide = self.selected.shape
        places = experts + (slots.clamp(max=most - 1) * wide).unsqueeze(1)
        self._count(self.selected, places, (slots < most).long().unsqueeze(1))
        some = experts[-self._rows % _EVERY :: _EVERY]  # as if all passes were one
        self._rows += len(experts)
        self._count(self.together, some.unsqueeze(2) * wide + some.unsqueeze(1), self._one)

    def _count(self, table: Tensor, places: Tensor, times: Tensor) -> None:
        table.view(-1).scatter_add_(0, places.flatten(), times.expand_as(places).flatten())

    def clear(self) -> None:
        """Begin anew."""
        self.selected.zero_()
        self.together.zero_()
