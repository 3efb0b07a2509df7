"""What is read of a checkpoint's files: a rank's own part of every tensor, and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone import weights
from megatron_mux.backbone.checkpoint import Checkpoint
from megatron_mux.backbone.registry import FAMILIES, read_backbone_info, stored_dtype
from megatron_mux.expert_shape import Placement

Made = Callable[..., Path]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_reads_its_own_bytes_only(
    name: str, rank: int, checkpoints: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints(name)
    info = read_backbone_info(path)
    placement = None
    if info.shape.experts is not None:
        placement = Placement.contiguous(info.shape.experts.count, 2, range(info.shape.layers))
    plan = weights.plan(info.shape, range(1, 3), weights.Part(rank, 2, rank, placement=placement))
    wanted, read, preadv = 0, [], os.preadv

    def counted(file: int, buffers: Any, start: int) -> int:
        read.append(preadv(file, buffers, start))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    with Checkpoint(path) as source:
        for pieces in plan.values():
            rows = max(piece.row + piece.length for piece in pieces)
            width = len(pieces[0].inputs or ())
            value = torch.zeros((rows, width) if width else (rows,))
            for piece in pieces:
                weights._copy(value, piece, info.stored[piece.source], source)
            wanted += value.nbytes
            assert value.all()
    assert sum(read) == wanted


def test_a_part_of_a_matrix_is_that_part(checkpoints: Made) -> None:
    with Checkpoint(checkpoints("llama")) as source:
        name = "model.layers.0.mlp.down_proj.weight"
        whole = source.read(name, slice(0, 32))
        assert whole.shape == (32, 56)
        for rows, columns in (
            (slice(3, 9), slice(5, 50)),
            (slice(0, 1), slice(55, 56)),
            (slice(4, 4), slice(0, 9)),
        ):
            assert torch.equal(source.read(name, rows, columns), whole[rows, columns])


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": None}, None),
    ],
)
def test_the_dtype_is_what_the_config_names(
    fields: dict[str, str | None], dtype: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert stored_dtype(tmp_path) == dtype
