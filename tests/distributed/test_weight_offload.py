"""Wherever frozen weights live between uses, tasks come out as from one process that holds all of them; fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mux.backbone.model import Backbone, Recompute
from megatron_mux.backbone.weight_group import WeightGroup
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine, EvalResult
from megatron_mux.engine.evaluation import evaluator
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.conftest import assert_no_problems
from tests.distributed.test_engine_layouts import (
    LAYOUTS,
    Layout,
    Results,
    Tensors,
    cases_of,
    differences,
    train_on,
)
from tests.end_to_end.held_out import COUNT, classified, evaluated, make_case, plain, uneven
from tests.weight_groups import bytes_of


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("tied", lambda directory: tiny_models.make(directory, "llama-tied")) / "llama-tied"


def alone(joined: Callable[..., Parallel]) -> Parallel:
    """This process as the whole world."""
    here = joined(1, 1)
    return replace(here, rank=0, world_size=1, dp_rank=0, dp_size=1, dp_group=here.tp_group)


@pytest.fixture(scope="module")
def wanted(path: Path, joined: Callable[..., Parallel]) -> tuple[Results, Tensors]:
    """What one process makes of the tasks."""
    return train_on(lambda *_: alone(joined), path, cases_of("llama", 96), LAYOUTS[0], "spatial")


@pytest.mark.parametrize(
    ("layout", "kind", "policy", "recompute"),
    [
        (Layout(1, 1), "sharded", "temporal", "none"),
        (Layout(1, 1), "sharded-offloaded", "side by side", "full"),
        (Layout(2, 1), "sharded-offloaded", "chunks", "full"),
        (Layout(2, 1, True), "sharded", "chunks", "full"),
        (Layout(1, 2), "offloaded", "temporal", "none"),
        (Layout(1, 2, split=(1, 1, 1, 1)), "sharded-offloaded", "temporal", "full"),
    ],
)
def test_tasks_come_out_as_from_one_process(
    layout: Layout,
    kind: Kind,
    policy: str,
    recompute: Recompute,
    wanted: tuple[Results, Tensors],
    path: Path,
    joined: Callable[..., Parallel],
) -> None:
    found = train_on(joined, path, cases_of("llama", 96), layout, policy, kind, recompute)
    assert_no_problems(differences(found, wanted, f"{layout} {kind} {policy} {recompute}"))


@pytest.mark.parametrize(("layout", "choices"), [((1, 1), 3), ((1, 2), 0)])
def test_an_evaluation_finds_the_same(
    layout: tuple[int, int],
    choices: int,
    path: Path,
    joined: Callable[..., Parallel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluator, "TOKENS_PER_PASS", 40)
    monkeypatch.setattr(evaluator, "PASSES_PER_STAGE", 2)

    def result(parallel: Parallel, kind: Kind) -> EvalResult:
        backbone = Backbone.load(path, parallel, torch.float64, residence=kind)
        records = classified(choices) if choices else uneven(plain(), 4)
        return evaluated(backbone, parallel, make_case("lora", path), records)

    wanted = result(alone(joined), "resident")
    found = result(joined(*layout), "sharded")
    same = found.loss == pytest.approx(wanted.loss, rel=1e-9) and found.accuracy == wanted.accuracy
    assert_no_problems([] if same and found.records == COUNT else [f"{found} != {wanted}"])


@pytest.mark.parametrize("kind", ["sharded", "sharded-offloaded"])
def test_a_rank_keeps_its_share_alone(
    kind: Kind, path: Path, joined: Callable[..., Parallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between steps a fourth of the weights, and what fills each group up; during a step two groups more."""
    parallel = joined(1, 1)
    whole = Backbone.load(path, parallel, torch.float64)
    backbone = Backbone.load(path, parallel, torch.float64, residence=kind)
    groups = list({id(group): group for group in backbone.offload.groups.values()}.values())
    parameters = list(whole.model.parameters())
    size, filling = sum(p.nbytes for p in parameters), 256 * (len(parameters) + 4 * len(groups))
    problems = []
    if (
        not size
        <= 4 * sum(bytes_of(group).share.untyped_storage().nbytes() for group in groups)
        <= size + filling
    ):
        problems.append("the shares are not a fourth")
    alive = {id(p.untyped_storage()): p.untyped_storage().nbytes() for p in backbone.model.parameters()}
    if sum(alive.values()):
        problems.append("weights are in memory between steps")
    most = 0
    bring = WeightGroup.bring

    def brought(group: WeightGroup) -> None:
        nonlocal most
        bring(group)
        most = max(most, sum(bytes_of(u).whole.untyped_storage().nbytes() > 0 for u in groups))

    monkeypatch.setattr(WeightGroup, "bring", brought)
    engine = Engine(backbone, parallel)
    engine.register_tasks([case.task for case in cases_of("llama", 96)[:2]])
    engine.step()
    if any(bytes_of(group).whole.untyped_storage().nbytes() for group in groups):
        problems.append("weights are in memory after a step")
    if most != 2:
        problems.append(f"{most} units at once")
    assert_no_problems(problems)
