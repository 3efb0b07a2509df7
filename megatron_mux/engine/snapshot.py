"""The whole state of one task, gathered from the ranks that hold its parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
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
    if parallel.dp_rank != 0:  # the first replica has all of it
        return None
    moments, extra = optimizer.state(), adapter.state()
    pieces: list[_Piece] = []
    for p in [*adapter.parameters, *(p for p in adapter.fixed if adapter.tensors[p.key].stored)]:
        if p.owner:
            named = {"value": p.value, **moments.get(p.key, {})}
            named |= {"extra": extra[p.key]} if p.key in extra else {}
            index = None if p.index is None else p.index.cpu().numpy()
            pieces += [(p.key, p.full_shape, p.dim, index, name, _array(named[name])) for name in named]
    gathered: list[list[_Piece]] = [pieces]
    if parallel.tp_size * parallel.pp_size > 1:
        size = parallel.tp_size * parallel.pp_size
        received: list[Any] | None = [None] * size if parallel.rank == 0 else None
        # As arrays: tensors, as objects, take many times as long to send.
        dist.gather_object(pieces, received, dst=0, group=parallel.model_group)
        if received is None:
            return None
        gathered = received
    full = _assembled(piece for part in gathered for piece in part)
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


def _assembled(pieces: Iterable[_Piece]) -> dict[str, dict[str, Tensor]]:
    """Full CPU tensors by key and name."""
    full: dict[str, dict[str, Tensor]] = {}
    for key, shape, dim, index, name, array in pieces:
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
