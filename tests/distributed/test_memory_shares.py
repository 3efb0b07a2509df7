"""The sizes of shares of weights and adapters against what four ranks really hold; fp32, frozen backbone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_mux.backbone.model import Backbone, load_stages
from megatron_mux.backbone.registry import read_shape
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine
from megatron_mux.memory.forms.architecture import Architecture, architecture_of
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.stages import Stage, stages
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.test_engine_layouts import cases_of
from tests.weight_groups import bytes_of

LAYOUTS = {
    "DP4": ParallelConfig(data=4),
    "DP2+TP2": ParallelConfig(data=2, tensor=2),
    "SP4": ParallelConfig(tensor=4, sequence_parallel=True),
    "TP2+PP2": ParallelConfig(tensor=2, pipeline=2),
    "PP4": ParallelConfig(pipeline=4),
}


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    def make(directory: Path) -> None:
        tiny_models.make(directory, "llama", num_key_value_heads=4)

    return once("memory", make) / "llama"


@pytest.fixture(scope="module")
def architecture(path: Path) -> Architecture:
    return architecture_of(read_shape(path))


def _assert_equal(found: float, wanted: float, slack: float) -> None:
    """On every rank; all of them are compared before any complains."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, wanted))
    wrong = {rank: pair for rank, pair in enumerate(everyone) if abs(pair[0] - pair[1]) > slack * pair[1]}
    assert not wrong


def _loaded(
    path: Path, joined: Callable[..., Parallel], method: ParallelConfig, kind: Kind = "resident"
) -> tuple[Backbone, Parallel]:
    parallel = joined(method.tensor, method.pipeline, method.sequence_parallel)
    (backbone,) = load_stages(path, parallel, torch.float32, residence=kind)
    return backbone, parallel


def _stage(architecture: Architecture, method: ParallelConfig, parallel: Parallel) -> Stage:
    return stages(architecture, method)[parallel.pp_rank]


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights(name: str, path: Path, architecture: Architecture, joined: Callable[..., Parallel]) -> None:
    method = LAYOUTS[name]
    backbone, parallel = _loaded(path, joined, method)
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in backbone.model.parameters()
    }
    _assert_equal(sum(storages.values()), 4 * _stage(architecture, method, parallel).values, 0)


def test_shares_of_weights(path: Path, architecture: Architecture, joined: Callable[..., Parallel]) -> None:
    method = ParallelConfig(data=2, tensor=2, zero=3)
    backbone, parallel = _loaded(path, joined, method, "sharded")
    groups = backbone.offload.groups
    shares = sum(bytes_of(group).share.nbytes for group in groups.values())
    aligned = 256 * sum(1 for _ in backbone.model.parameters())
    stage = _stage(architecture, method, parallel)
    wanted = 4 * stage.divided(method)
    assert wanted <= shares <= wanted + aligned


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_of_every_kind(name: str, path: Path, joined: Callable[..., Parallel]) -> None:
    method, cases = LAYOUTS[name], cases_of("llama", 96)
    backbone, parallel = _loaded(path, joined, method)
    engine = Engine([backbone], parallel)
    engine.register_tasks([case.task for case in cases])
    shape = read_shape(path)
    found, wanted = {}, {}
    for case in cases:
        parameters = engine._tasks[case.name].optimizer.parameters
        found[case.name] = sum(p.value.numel() for p in parameters)
        wanted[case.name] = TaskAdapters.of(case.task.spec, shape).values(backbone.layers, method.tensor)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found == wanted or (found, wanted))
    assert everyone == [True] * len(everyone)
