"""The body's share of an adapter that training starts from, which the client sends to the server."""

from __future__ import annotations

import torch

from megatron_mux.adapters.host import Host
from megatron_mux.backbone.checkpoint import NoWeights
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import BackboneInfo, info_without_weights
from megatron_mux.engine import Task
from megatron_mux.engine.snapshot import stored_parameters
from megatron_mux.runtime import Parallel
from megatron_mux.split.protocol.pieces import Piece, runs_of


def body_share(task: Task, info: BackboneInfo, layers: range, dtype: torch.dtype) -> list[Piece]:
    """Values of a task's adapter in some layers; of tensors that all layers share, what belongs to these.

    The adapter is made as the server makes it, on layers that take no memory.

    Args:
        task: With the adapter to start from.
        layers: Global indices of the body's layers.
    """
    nowhere, info = Parallel.alone("meta"), info_without_weights(info.path)
    body = Backbone(info, nowhere, layers, dtype, "none", "resident", NoWeights(), ends=False)
    host = Host(body.base_ops(), Parallel.alone("cpu"), dtype, body.shape)
    total = task.spec.total_steps(len(task.data))
    adapter = task.spec.adapter.attach(host, task.spec, total, task.initial)
    pieces = []
    for record in stored_parameters(adapter):
        divided = record.dim is not None and record.index is not None
        runs = runs_of(record.index) if divided and record.index is not None else ()
        dim = record.dim if divided else None
        pieces.append(Piece(record.key, "value", record.full_shape, record.value.detach(), dim, runs))
    return pieces
