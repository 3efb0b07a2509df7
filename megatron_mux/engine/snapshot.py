"""The whole state of one task, gathered from the ranks that hold its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.adapter import AdapterParameter, TaskAdapter
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.runtime import Parallel


@dataclass
class Snapshot:
    """A task's state as full tensors, independent of how the backbone is split.

    Attributes:
        step: Optimizer steps done.
        adapter: Its tensors by key, as `adapter_model.safetensors` names them.
        moments: Optimizer moments by key, then by name (`exp_avg`, `exp_avg_sq`); empty for SGD.
        extra: What the adapter keeps besides parameters (diff pruning's mask), by key.
    """

    step: int
    adapter: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)


Array = npt.NDArray[Any]
_Piece = tuple[str, tuple[int, ...], int | None, Array | None, str, Array]
"""Key, full shape, the dimension that is divided, this piece's indices in it; name and values."""


def take(adapter: TaskAdapter, optimizer: TaskOptimizer, step: int, parallel: Parallel) -> Snapshot | None:
    """A task's whole state on rank 0, None elsewhere. Every rank calls it.

    Args:
        adapter: This rank's part of the adapter.
        optimizer: Steps it.
        step: Optimizer steps done.
        parallel: Where this rank stands.
    """
    moments = optimizer.state()
    tensors = [*adapter.parameters, *(p for p in adapter.fixed if adapter.tensors[p.key].stored)]
    local = {p.key: {"value": p.value, **moments.get(p.key, {})} for p in tensors}
    for key, tensor in adapter.state().items():
        local[key]["extra"] = tensor
    full = gather(tensors, local, parallel)
    if full is None:
        return None
    return Snapshot(
        step=step,
        adapter={key: named["value"] for key, named in full.items()},
        moments={
            key: {n: named[n] for n in ("exp_avg", "exp_avg_sq")}
            for key, named in full.items()
            if "exp_avg" in named
        },
        extra={key: named["extra"] for key, named in full.items() if "extra" in named},
    )


def gather(
    parameters: Sequence[AdapterParameter], columns: Mapping[str, Mapping[str, Tensor]], parallel: Parallel
) -> dict[str, dict[str, Tensor]] | None:
    """Assemble full tensors on rank 0.

    Args:
        parameters: This rank's parameters: they say where its pieces lie.
        columns: What to gather, by parameter key and then by name (`value`, `exp_avg`, ...): local tensors.
        parallel: Where this rank stands; only the first data-parallel replica takes part.

    Returns:
        Full CPU tensors by key and name on rank 0, None elsewhere.
    """
    if parallel.dp_rank != 0:
        return None
    # As arrays: tensors, as objects, take many times as long to send.
    pieces = [
        (p.key, p.full_shape, p.dim, None if p.index is None else p.index.cpu().numpy(), name, _array(tensor))
        for p in parameters
        if p.owner
        for name, tensor in columns.get(p.key, {}).items()
    ]
    gathered: list[list[_Piece]] = [pieces]
    if parallel.tp_size * parallel.pp_size > 1:
        size = parallel.tp_size * parallel.pp_size
        received: list[Any] | None = [None] * size if parallel.rank == 0 else None
        dist.gather_object(pieces, received, dst=0, group=parallel.model_group)
        if received is None:
            return None
        gathered = received
    full: dict[str, dict[str, Tensor]] = {}
    for part in gathered:
        for key, shape, dim, index, name, array in part:
            names, tensor = full.setdefault(key, {}), torch.from_numpy(array)
            if dim is None or index is None:
                names[name] = tensor.clone()
                continue
            if name not in names:
                names[name] = torch.zeros(shape, dtype=tensor.dtype)
            names[name].index_copy_(dim, torch.from_numpy(index), tensor)
    return full


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().numpy()
    return array
