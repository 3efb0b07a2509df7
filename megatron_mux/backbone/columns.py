"""Where Hugging Face modules lie within Megatron's fused, divided operators.

Megatron fuses q, k and v group by group (the queries of a key-value head, its key, its value), divides the fused rows
evenly among tensor ranks, even amid a group where ranks outnumber key-value heads, and keeps the gate's part of a rank
before the plain half's. One function says which output feature of which role each column of a rank holds; weights are
read and adapters are placed by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mux.backbone.family import Module, Names
from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.layout import BaseOpName, Part


@dataclass(frozen=True)
class Place:
    """Some columns of a BaseOp's output on one rank, in ascending order, and the role's features they hold."""

    columns: Tensor
    features: Tensor


def role_width(shape: BackboneShape, role: str) -> int:
    """Full output width of a role."""
    kv = shape.kv_heads * shape.head_dim
    widths = {"q": shape.heads * shape.head_dim, "k": kv, "v": kv, "out": shape.hidden}
    return widths.get(role, shape.ffn)


def places(shape: BackboneShape, op: BaseOpName, rank: int, size: int) -> dict[str, Place]:
    """Where each role lies in a BaseOp's output on tensor rank `rank` of `size`; possibly nowhere."""
    if op == "linear_qkv":
        return _qkv(shape, rank, size)
    if op == "linear_fc1":
        part = shape.ffn // size
        features = torch.arange(rank * part, (rank + 1) * part)
        roles = ("gate", "up") if shape.gated else ("fc",)
        return {role: Place(torch.arange(part) + i * part, features) for i, role in enumerate(roles)}
    every = torch.arange(shape.hidden)
    return {"out": Place(every, every)}


def _qkv(shape: BackboneShape, rank: int, size: int) -> dict[str, Place]:
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
        found[role] = Place(columns, features[columns])
    return found


def part(shape: BackboneShape, module: Module, found: dict[str, Place]) -> Part:
    """The place of a whole Hugging Face module, whose output may hold several roles one after the other."""
    columns, features, offset = [], [], 0
    for role in module.roles:
        columns.append(found[role].columns)
        features.append(found[role].features + offset)
        offset += role_width(shape, role)
    column, order = torch.cat(columns).sort()
    return Part(column, torch.cat(features)[order], offset)


def parts(shape: BackboneShape, names: Names, op: BaseOpName, rank: int, size: int) -> dict[str, Part]:
    """The places of a BaseOp's modules by their path within the layer."""
    found = places(shape, op, rank, size)
    return {module.path: part(shape, module, found) for module in names.ops[op]}


def in_range(shape: BackboneShape, op: BaseOpName, rank: int, size: int) -> tuple[int, int]:
    """Which input features a rank holds: all of them where the BaseOp's columns are divided."""
    full = shape.in_features(op)
    if op in ("linear_qkv", "linear_fc1"):
        return 0, full
    return rank * (full // size), (rank + 1) * (full // size)


def runs(columns: Tensor, features: Tensor) -> list[tuple[int, int, int]]:
    """Cut a place into `(column, feature, length)` runs in which both count up by one."""
    if not columns.numel():
        return []
    jumps = ((columns.diff() != 1) | (features.diff() != 1)).nonzero().squeeze(1) + 1
    edges = [0, *jumps.tolist(), columns.shape[0]]
    return [
        (int(columns[start]), int(features[start]), stop - start)
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
