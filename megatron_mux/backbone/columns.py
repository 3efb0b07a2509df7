"""Which columns of Megatron's fused, divided operators hold which features of Hugging Face modules.

Megatron fuses q, k and v group by group (the queries of a key-value head, its key, its value) and divides the fused
rows evenly among tensor ranks, which splits groups where there are more ranks than key-value heads. On each rank the
gate's columns come before the plain half's. `roles` says which output feature of which role each column of a rank
holds; weights are read and adapters are divided by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mux.base_ops import COLUMN_PARALLEL, LATENT_OPS, REPLICATED, BaseOpName, ModuleColumns
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import Linear

MODULE_PATHS: dict[BaseOpName, str] = {
    "linear_qkv": "self_attention.linear_qkv",
    "linear_q": "self_attention.linear_q",
    "linear_q_down": "self_attention.linear_q_down",
    "linear_q_up": "self_attention.linear_q_up",
    "linear_kv_down": "self_attention.linear_kv_down",
    "linear_kv_up": "self_attention.linear_kv_up",
    "linear_proj": "self_attention.linear_proj",
    "linear_fc1": "mlp.linear_fc1",
    "linear_fc2": "mlp.linear_fc2",
    "shared_fc1": "mlp.shared_experts.linear_fc1",
    "shared_fc2": "mlp.shared_experts.linear_fc2",
    "experts_fc1": "mlp.experts_fc1",
    "experts_fc2": "mlp.experts_fc2",
}
"""Where a layer of ours keeps its BaseOps."""


def roles(shape: BackboneShape, op: BaseOpName, rank: int, size: int) -> dict[str, ModuleColumns]:
    """The columns of each role in a BaseOp's output on tensor rank `rank` of `size`; there may be none.

    Of the experts' BaseOps: in one expert's output, on the rank among those that divide an expert.
    """
    if op == "linear_qkv":
        return _qkv(shape, rank, size)
    if op in LATENT_OPS:
        whole = shape.out_features(op)
        part, first = (whole, 0) if op in REPLICATED else (whole // size, rank * (whole // size))
        (role,) = shape.names.ops[op][0].roles
        return {role: ModuleColumns(torch.arange(part), torch.arange(first, first + part), whole)}
    if op in COLUMN_PARALLEL:
        inner = shape.inner(op)
        part = inner // size
        features = torch.arange(rank * part, (rank + 1) * part)
        halves = ("gate", "up") if shape.gated else ("fc",)
        return {
            role: ModuleColumns(torch.arange(part) + i * part, features, inner)
            for i, role in enumerate(halves)
        }
    every = torch.arange(shape.hidden)
    return {"out": ModuleColumns(every, every, shape.hidden)}


def _qkv(shape: BackboneShape, rank: int, size: int) -> dict[str, ModuleColumns]:
    groups, per_group, width = shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim
    queries = torch.arange(shape.heads * width).view(groups, per_group * width)
    keys = torch.arange(groups * width).view(groups, width)
    features = torch.cat((queries, keys, keys), dim=1).flatten()
    kind = torch.tensor([0] * (per_group * width) + [1] * width + [2] * width).repeat(groups)
    part = features.shape[0] // size
    mine = slice(rank * part, (rank + 1) * part)
    features, kind = features[mine], kind[mine]
    found = {}
    for i, role in enumerate(("q", "k", "v")):
        columns = (kind == i).nonzero().squeeze(1)
        found[role] = ModuleColumns(columns, features[columns], shape.role_width("linear_qkv", role))
    return found


def _joined(module: Linear, found: dict[str, ModuleColumns]) -> ModuleColumns:
    """The columns of a whole Hugging Face module, whose output may hold several roles one after the other."""
    columns, features, offset = [], [], 0
    for role in module.roles:
        columns.append(found[role].columns)
        features.append(found[role].features + offset)
        offset += found[role].out_features
    column, order = torch.cat(columns).sort()
    return ModuleColumns(column, torch.cat(features)[order], offset)


def parts(shape: BackboneShape, op: BaseOpName, rank: int, size: int) -> dict[str, ModuleColumns]:
    """The columns of a BaseOp's modules on tensor rank `rank` of `size`, by their path within the layer."""
    found = roles(shape, op, rank, size)
    return {module.path: _joined(module, found) for module in shape.names.ops[op]}


def inputs(shape: BackboneShape, op: BaseOpName, rank: int, size: int) -> range:
    """The input features that a rank holds: all of them for column-parallel BaseOps."""
    full = shape.in_features(op)
    if op in COLUMN_PARALLEL:
        return range(full)
    return range(rank * (full // size), (rank + 1) * (full // size))


def runs(columns: Tensor, features: Tensor) -> list[tuple[int, int, int]]:
    """Split matching columns and features into `(column, feature, length)` runs in which both count up by one."""
    if not columns.numel():
        return []
    jumps = ((columns.diff() != 1) | (features.diff() != 1)).nonzero().squeeze(1) + 1
    edges = [0, *jumps.tolist(), columns.shape[0]]
    return [
        (int(columns[start]), int(features[start]), stop - start)
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
