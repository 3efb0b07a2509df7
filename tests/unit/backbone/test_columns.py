"""Where modules lie in Megatron's divided operators: each feature exactly once over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_mux.backbone import columns, resolve, weights
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.base_ops import COLUMN_PARALLEL, REPLICATED
from megatron_mux.expert_shape import Placement
from tests import tiny_models

Made = Callable[..., Path]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_every_feature_has_one_place(name: str, size: int, checkpoints: Made) -> None:
    info = read_backbone_info(checkpoints(name))
    shape, names = info.shape, info.shape.names
    for op in sorted({op for layer in range(shape.layers) for op in shape.ops(layer)}):
        width = shape.out_features(op) // (size if op in COLUMN_PARALLEL and op not in REPLICATED else 1)
        seen: dict[str, list[torch.Tensor]] = {}
        for rank in range(size):
            parts = columns.parts(shape, op, rank, size)
            taken = torch.cat([part.columns for part in parts.values()])
            assert taken.sort().values.tolist() == list(range(width))
            for path, part in parts.items():
                assert part.columns.shape == part.features.shape
                seen.setdefault(path, []).append(part.features)
                for column, feature, length in columns.runs(part.columns, part.features):
                    index = int((part.columns == column).nonzero())
                    assert part.features[index : index + length].tolist() == list(
                        range(feature, feature + length)
                    )
        for path, found in seen.items():
            out = sum(shape.role_width(op, role) for m in names.ops[op] if m.path == path for role in m.roles)
            whole = torch.cat(found) if op in COLUMN_PARALLEL and op not in REPLICATED else found[0]
            assert whole.sort().values.tolist() == list(range(out))


def test_key_value_heads_fewer_than_ranks_lie_irregularly(checkpoints: Made) -> None:
    info = read_backbone_info(checkpoints("llama-one-kv-head"))
    parts = [columns.parts(info.shape, "linear_qkv", rank, 4) for rank in range(4)]
    assert [p["self_attn.k_proj"].columns.numel() for p in parts] == [0, 0, 4, 4]
    assert [p["self_attn.v_proj"].columns.numel() for p in parts] == [0, 0, 0, 8]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_the_plan_reads_each_element_once_over_the_ranks(
    name: str, tensor: int, pipeline: int, checkpoints: Made
) -> None:
    info = read_backbone_info(checkpoints(name))
    shape, names = info.shape, info.shape.names
    size = -(-shape.vocab // tensor) * tensor
    shape = dataclasses.replace(shape, padded_vocab=size)
    expected = resolve.expected(shape)
    placement = routers = None
    if shape.experts is not None:
        placement = Placement.contiguous(shape.experts.count, tensor, shape.experts.layers(shape.layers))
        routers = f"{shape.experts.names.stored_router}.weight"
    count = {source: torch.zeros(dims, dtype=torch.int32) for source, dims in expected.items()}
    for stage in range(pipeline):
        for rank in range(tensor):
            layers = stage_layers(even_split(shape.layers, pipeline))[stage]
            part = weights.Part(rank, tensor, expert_rank=rank, placement=placement)
            for pieces in weights.plan(shape, layers, part).values():
                for piece in pieces:
                    here = count[piece.source].t() if piece.transposed else count[piece.source]
                    rows = slice(piece.start, piece.start + piece.length)
                    inputs = piece.inputs
                    here[(rows, slice(inputs.start, inputs.stop)) if inputs else rows] += 1
    for source, found in count.items():
        divided = found.dim() == 2 and source != f"{names.positions}.weight"
        whole = [m.path for op in REPLICATED for m in names.ops.get(op, ())]
        whole += [routers] if routers else []
        divided = divided and not any(path in source for path in whole)
        tied = 2 if shape.tied and pipeline > 1 and source == f"{names.embedding}.weight" else 1
        if divided:
            assert (found == tied).all(), source
        else:
            assert (found >= 1).all(), source
