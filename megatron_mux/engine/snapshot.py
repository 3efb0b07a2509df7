"""The whole state of one task: copied to host memory on each rank, gathered from the ranks that hold its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.optimizers.optimizer import Stored
from megatron_mux.runtime import Parallel, pinned


@dataclass
class Snapshot:
    """A task's state as full tensors, independent of how the backbone is split.

    Attributes:
        step: Optimizer steps done.
        adapter: Its tensors by key, as `adapter_model.safetensors` names them.
        moments: States of the optimizer by key, then by name; empty for SGD.
        extra: What the adapter keeps besides parameters (diff pruning's mask), by key.
    """

    step: int
    adapter: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)


Array = npt.NDArray[Any]
_Place = tuple[str, tuple[int, ...], int | None, Array | None, str]
"""Key, full shape, the dimension that is divided, this piece's indices in it; name of the values."""

_ALIGNMENT = 16


class HostCopy(NamedTuple):
    """A tensor's copy in host memory.

    Attributes:
        block: `[n]` uint8, the copy of the tensor's storage.
        dtype, shape, stride, offset: Where in it the tensor is.
    """

    block: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The copy; a view of the block."""
        whole = self.block.view(self.dtype)
        return whole.as_strided(self.shape, self.stride, int(whole.storage_offset()) + self.offset)


class HostMemory:
    """Host memory to which tensors are copied while the device goes on; each copy replaces the last.

    On a GPU it is pinned, and copies run on a stream of their own.

    Args:
        device: Where the tensors are.

    Attributes:
        copied: Once this has happened the tensors may change; None: they may at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.copied: torch.cuda.Event | None = None
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[HostCopy]:
        """Copy tensors; the copies are there once `wait` has returned, until the next call.

        Tensors that share a storage, as flat parameters do, are copied together, with whatever else is in it.
        """
        used: dict[int, int] = {}
        for tensor in tensors:
            key = tensor.untyped_storage().data_ptr()
            used[key] = used.get(key, 0) + tensor.nbytes
        blocks: dict[int, int] = {}
        flat, storages = list[Tensor](), list[tuple[int, Tensor]]()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if storage.nbytes() > 2 * used[key]:  # mostly somebody else's
                tensor = tensor.contiguous().clone()
                storage, key = tensor.untyped_storage(), -len(flat)
            if key not in blocks:
                blocks[key] = len(flat)
                flat.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            storages.append((blocks[key], tensor))
        copies = self._copy(flat)
        return [
            HostCopy(copies[block], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            for block, tensor in storages
        ]

    def _copy(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """Copies of `[n]` uint8 tensors."""
        sizes = [-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in flat]
        size = sum(sizes)
        if self._memory.numel() < size:
            memory = pinned(size, self._device)
            if memory is not None:
                self._stream = self._stream or torch.cuda.Stream(self._device)
            self._memory = torch.empty(size, dtype=torch.uint8) if memory is None else memory
        pieces = self._memory[:size].split(sizes)
        copies = [piece[: tensor.numel()] for piece, tensor in zip(pieces, flat, strict=True)]
        if self._stream is None:
            for copy, tensor in zip(copies, flat, strict=True):
                copy.copy_(tensor)
            return copies
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(copies, flat, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            self.copied = torch.cuda.Event()
            self.copied.record()
        return copies

    def wait(self) -> None:
        """Wait until the copies are there."""
        if self.copied is not None:
            self.copied.synchronize()


@dataclass(frozen=True)
class LocalState:
    """What this rank holds of a task's state, copied to host memory.

    Attributes:
        step: Optimizer steps done.
        places: Where each copy belongs.
        copies: The copies, which may still be on their way.
        memory: Holds them.
        in_files: Brings the adapter's full tensors to the form of its files.
    """

    step: int
    places: Sequence[_Place]
    copies: Sequence[HostCopy]
    memory: HostMemory
    in_files: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

    def gather(self, parallel: Parallel, group: dist.ProcessGroup | None) -> Snapshot | None:
        """The task's whole state on rank 0, None elsewhere. Every rank of the first pipeline calls it.

        Args:
            parallel: Where this rank stands.
            group: Those ranks, for objects in host memory.
        """
        self.memory.wait()
        pieces = [
            (*place, copy.tensor().numpy()) for place, copy in zip(self.places, self.copies, strict=True)
        ]
        gathered = [pieces]
        size = len(parallel.model_ranks)
        if size > 1:
            received: list[Any] | None = [None] * size if parallel.rank == 0 else None
            # As arrays: tensors, as objects, take many times as long to send.
            dist.gather_object(pieces, received, dst=0, group=group)
            if received is None:
                return None
            gathered = received
        full = _assembled(piece for part in gathered for piece in part)
        return Snapshot(
            step=self.step,
            adapter=self.in_files({key: named["value"] for key, named in full.items()}),
            moments={
                key: moments
                for key, named in full.items()
                if (moments := {name: t for name, t in named.items() if name not in ("value", "extra")})
            },
            extra={key: named["extra"] for key, named in full.items() if "extra" in named},
        )


def copy_states(
    tasks: Mapping[str, tuple[TaskAdapter, TaskOptimizer, int]], memory: HostMemory, owned: bool = True
) -> dict[str, LocalState]:
    """Copy what this rank holds of tasks' states to host memory, without waiting for a GPU.

    Args:
        tasks: The adapter, the optimizer, and the optimizer steps done of each task.
        memory: Where the copies go.
        owned: Leave out what another rank has as well, and owns.
    """
    places: dict[str, list[_Place]] = {name: [] for name in tasks}
    tensors: list[Tensor] = []
    for name, (adapter, optimizer, _) in tasks.items():
        moments, extra = optimizer.state(), adapter.state()
        for p in stored_parameters(adapter):
            if p.owner or not owned:
                whole = p.full_shape, p.dim, p.index
                named = {"value": Stored(p.value, *whole), **moments.get(p.key, {})}
                named |= {"extra": Stored(extra[p.key], *whole)} if p.key in extra else {}
                for kind, (tensor, shape, dim, positions) in named.items():
                    index = None if positions is None else positions.cpu().numpy()
                    places[name].append((p.key, shape, dim, index, kind))
                    tensors.append(tensor.detach())
    copies = iter(memory.copy(tensors))
    return {
        name: LocalState(
            step,
            places[name],
            [next(copies) for _ in places[name]],
            memory,
            partial(adapter.spec.in_files, shape=adapter.host.shape),
        )
        for name, (adapter, _, step) in tasks.items()
    }


def stored_parameters(adapter: TaskAdapter) -> list[AdapterParameter]:
    """What this rank holds of a task's adapter and cannot make again."""
    return [*adapter.parameters, *(p for p in adapter.fixed if adapter.tensors[p.key].stored)]


def _assembled(pieces: Iterable[Any]) -> dict[str, dict[str, Tensor]]:
    """Full CPU tensors by key and name."""
    full: dict[str, dict[str, Tensor]] = {}
    for key, shape, dim, index, name, array in pieces:
        names, tensor = full.setdefault(key, {}), torch.from_numpy(array)
        is_whole = index is None or (array.shape == shape and np.array_equal(index, np.arange(len(index))))
        if dim is None or is_whole:
            names[name] = tensor
            continue
        if name not in names:
            names[name] = torch.zeros(shape, dtype=tensor.dtype)
        names[name].index_copy_(dim, torch.from_numpy(index), tensor)
    return full
