"""Routed experts move between ranks while tasks train, and what tasks have learned about them goes along.

Expert-parallel ranks have the adapters of all experts: weights move alone. An expert manager has a task's LoRA of its
own experts only. When experts move, so does that part, with its optimizer's state, straight from manager to manager;
all else of a task's state stays on the rank that has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.tensors import AdapterTensor
from megatron_mux.engine.agreement import out_of_memory_on_every_rank
from megatron_mux.engine.engine import Engine
from megatron_mux.engine.snapshot import Array, HostCopy, HostMemory, LocalState, stored_parameters
from megatron_mux.engine.task_state import TaskState
from megatron_mux.expert_shape import Placement
from megatron_mux.runtime import Parallel


def place_experts(engine: Engine, placement: Placement) -> int:
    """Move routed experts to the ranks that a placement names, between steps. Every rank calls it.

    Losses and adapters go on as if they had been there before, to rounding.

    Returns:
        Bytes that this rank received.

    Raises:
        UserError: Weights are not resident, or some rank has no memory for an adapter: then the run cannot go on.
    """
    parallel, before = engine.parallel, engine.backbone.placement
    divided = parallel.experts.divides_adapters
    states: dict[str, LocalState] = {}
    if divided:
        engine.quiesce()
        states = engine.local_states(engine.tasks, HostMemory(parallel.device), owned=False)
        for name in engine.tasks:
            engine.adapters.remove(name)
    received = sum(stage.place_experts(placement) for stage in engine.stages.values())
    engine.adapters.renew_experts()
    if divided:
        assert before is not None
        hand_over = HandOver(parallel, before, placement)
        for name, task in engine.states.items():
            received += hand_over.attach(task, engine.adapters, states[name])
        what = "experts have moved, and there is no memory for the gradients of their adapters"
        with out_of_memory_on_every_rank(what, parallel):
            engine.reserve_gradient_buffer()
    engine.forget_trials()
    return received


class _Part(NamedTuple):
    """A tensor of a task's state, as far as this rank holds it.

    Attributes:
        key: Of the adapter's tensor.
        kind: `value`, or the name of an optimizer moment.
        positions: Global positions, along the dimension that has all experts' ranks, of what is held here.
        value: The tensor.
    """

    key: str
    kind: str
    positions: Array | Tensor | None
    value: Tensor


class _Message(NamedTuple):
    """What this rank exchanges with the others for a task, rank by rank.

    Attributes:
        sent, came: Values; the latter are received.
        outgoing, incoming: [ranks] number of values.
        arriving: What comes: the tensor, its places along `expert_dim`, its values in `came`.
    """

    sent: Tensor
    came: Tensor
    outgoing: list[int]
    incoming: list[int]
    arriving: list[tuple[_Part, Tensor, Tensor]]


class HandOver:
    """Sends the parts of tasks' states that belong to experts after them. Every expert rank makes one.

    Args:
        parallel: Where this rank stands: a master or one of its expert managers.
        before, after: Where experts were, and where they are by now; each is on one rank.
    """

    def __init__(self, parallel: Parallel, before: Placement, after: Placement) -> None:
        self._parallel, self._ranks = parallel, parallel.experts
        self._before, self._after = before, after

    def attach(self, task: TaskState, adapters: AdapterSet, old: LocalState) -> int:
        """Attach a task anew, in the state that it had before experts moved. A collective.

        Args:
            adapters: Where to.
            old: What this rank held of its state.

        Returns:
            Bytes that this rank received.

        Raises:
            SharedError: Some rank ran out of memory: the run cannot go on.
        """
        old.memory.wait()
        values = {key: c.tensor() for (key, _, _, _, kind), c in _zip(old) if kind == "value"}
        # What an adapter computes from tensors as it is made, it must have; no expert's part is among them.
        whole = {key: v for key, v in values.items() if v.shape == task.adapter.tensors[key].shape}
        what = f"task {task.task.spec.name!r}: experts have moved, and there is no memory for their adapters"
        with out_of_memory_on_every_rank(what, self._parallel):
            task.attach(adapters, whole)
            message = self._fill(task, old)
        if any(tensor.expert_dim is not None for tensor in task.adapter.tensors.values()):
            came, sent, incoming, outgoing = message.came, message.sent, message.incoming, message.outgoing
            dist.all_to_all_single(came, sent, incoming, outgoing, group=self._ranks.group)
        with out_of_memory_on_every_rank(what, self._parallel), torch.no_grad():
            for part, places, value in message.arriving:
                _put(part, task.adapter.tensors[part.key], places, value)
            task.adapter.flat_params.refresh()
        return message.came.nbytes

    @torch.no_grad()
    def _fill(self, task: TaskState, old: LocalState) -> _Message:
        """Give a task that was made anew what this rank has of its old state; returns what is to be exchanged."""
        adapter, extra = task.adapter, dict[str, Tensor]()
        new = {(part.key, part.kind): part for part in _parts_of(task)}
        leaving: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for (key, _, _, index, kind), copy in _zip(old):
            tensor, value = adapter.tensors[key], copy.tensor()
            if kind == "extra":
                extra[key] = value
            elif tensor.expert_dim is None:
                new[key, kind].value.copy_(value)
            else:
                part = _Part(key, kind, index, value)
                for target, places in self._moving(adapter, tensor, self._ranks.rank, None):
                    taken = _taken(part, tensor, places)
                    if target == self._ranks.rank:
                        _put(new[key, kind], tensor, places, taken.to(new[key, kind].value.device))
                    else:
                        leaving[target].append(taken.flatten())
        adapter.load_state(extra)
        return self._message(adapter, new, leaving)

    def _message(
        self, adapter: TaskAdapter, new: Mapping[tuple[str, str], _Part], leaving: list[list[Tensor]]
    ) -> _Message:
        """Lay out what leaves this rank, and allocate what comes."""
        rank, host = self._ranks.rank, adapter.host
        coming: list[list[tuple[_Part, Tensor]]] = [[] for _ in range(self._ranks.size)]
        for part in new.values():
            tensor = adapter.tensors[part.key]
            if tensor.expert_dim is not None:
                for source, places in self._moving(adapter, tensor, None, rank):
                    if source != rank:
                        coming[source].append((part, places))
        sizes = [[_size(adapter, *piece) for piece in ones] for ones in coming]
        incoming, outgoing = [sum(part) for part in sizes], [sum(map(len, part)) for part in leaving]
        nothing = torch.empty(0, dtype=host.parameter_dtype)
        sent = torch.cat([nothing, *(value for pieces in leaving for value in pieces)]).to(host.device)
        came = sent.new_empty(sum(incoming))
        values = came.split([size for of_rank in sizes for size in of_rank])
        parts = (piece for ones in coming for piece in ones)
        arriving = [(part, places, value) for (part, places), value in zip(parts, values, strict=True)]
        return _Message(sent, came, outgoing, incoming, arriving)

    def _moving(
        self, adapter: TaskAdapter, tensor: AdapterTensor, source: int | None, target: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each other end, and places along `expert_dim` of the experts that go from the one to the other."""
        assert tensor.layer is not None
        for other in range(self._ranks.size):
            old, new = (other if end is None else end for end in (source, target))
            after = set(self._after.held(tensor.layer, new))
            experts = [expert for expert in self._before.held(tensor.layer, old) if expert in after]
            if experts:
                yield other, adapter.places_of_experts(tensor, experts)


def adapter_bytes_per_expert(engine: Engine) -> float:
    """Bytes of tasks' adapters and optimizer states that move with an expert's weights, mean of all experts."""
    shape = engine.backbone.shape
    if not engine.parallel.experts.divides_adapters or shape.experts is None:
        return 0.0
    values = sum(
        math.prod(tensor.shape) * (1 + (task.optimizer.optimizer.states_per_value or 0))
        for task in engine.states.values()
        for tensor in task.adapter.tensors.values()
        if tensor.expert_dim is not None
    )
    itemsize = engine.adapters.host.parameter_dtype.itemsize
    return values * itemsize / (shape.experts.count * len(shape.experts.layers(shape.layers)))


def _zip(state: LocalState) -> Iterator[tuple[Any, HostCopy]]:
    return zip(state.places, state.copies, strict=True)


def _parts_of(task: TaskState) -> Iterator[_Part]:
    """What this rank holds of a task's state, in the order of `copy_states`; its values may be written to."""
    moments = task.optimizer.state()
    for p in stored_parameters(task.adapter):
        states = {name: stored.tensor for name, stored in moments.get(p.key, {}).items()}
        for kind, value in {"value": p.value.detach(), **states}.items():
            yield _Part(p.key, kind, p.index, value)


def _here(part: _Part, tensor: AdapterTensor, places: Tensor) -> Tensor:
    """Where this rank's part of a tensor has global places."""
    assert part.positions is not None and tensor.expert_dim is not None
    index = torch.as_tensor(np.asarray(part.positions))
    indices = torch.full((tensor.shape[tensor.expert_dim],), -1, dtype=torch.int64)
    indices[index] = torch.arange(len(index))
    return indices[places].to(part.value.device)


def _taken(part: _Part, tensor: AdapterTensor, places: Tensor) -> Tensor:
    assert tensor.expert_dim is not None
    return part.value.index_select(tensor.expert_dim, _here(part, tensor, places))


def _put(part: _Part, tensor: AdapterTensor, places: Tensor, value: Tensor) -> None:
    dim, shape = tensor.expert_dim, list(tensor.shape)
    assert dim is not None
    shape[dim] = len(places)
    part.value.index_copy_(dim, _here(part, tensor, places), value.view(shape))


def _size(adapter: TaskAdapter, part: _Part, places: Tensor) -> int:
    """Values of a tensor at places along `expert_dim`."""
    tensor = adapter.tensors[part.key]
    assert tensor.expert_dim is not None
    return len(places) * tensor.shape[1 - tensor.expert_dim]
