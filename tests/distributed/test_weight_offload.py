"""Wherever frozen weights live between uses, tasks come out as from one process that holds all of them; fp64.

Tasks have so few and so different sequences that data-parallel ranks have different numbers of micro-batches and
chunks, and some nothing at all of a task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import Backbone, Recompute, load_stages
from megatron_mux.backbone.split import Split
from megatron_mux.backbone.weight_group import WeightGroup
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine, EvalResult
from megatron_mux.engine.evaluation import evaluator
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.test_engine_layouts import Layout, planning_of
from tests.end_to_end.harness import Case, random_records, relative
from tests.end_to_end.held_out import COUNT, classified, evaluated, make_case, plain, uneven
from tests.weight_groups import bytes_of

LAYOUTS: dict[str, Layout] = {
    "DP4": Layout(1, 1),
    "TP2xDP2": Layout(2, 1),
    "SP2xDP2": Layout(2, 1, True),
    "PP2xDP2": Layout(1, 2),
    "virtual PP2xDP2": Layout(1, 2, split=(1, 1, 1, 1)),
}
STEPS = 3

Losses = list[dict[str, tuple[float, float]]]


def _cases() -> list[Case]:
    def case(name: str, adapter: dict[str, object], batch: int, longest: int, **training: object) -> Case:
        training = {
            "per_device_train_batch_size": batch,
            "learning_rate": 1e-2,
            "max_steps": 8,
            "max_grad_norm": 0.05,
            "seed": batch,
            **training,
        }
        return Case(name, adapter, training, random_records(2 * batch + 1, 96, 3, longest, seed=longest))

    def lora(targets: object) -> dict[str, object]:
        return {"peft_type": "LORA", "r": 3, "lora_dropout": 0.1, "target_modules": targets}

    return [
        case("many", lora("all-linear"), 7, 12, gradient_accumulation_steps=2),
        case("one", lora(["q_proj", "v_proj"]), 1, 16),
        case("above", lora(r".*layers\.3\..*(q|down)_proj"), 1, 9),
        case(
            "bottle", {"peft_type": "BOTTLENECK", "bottleneck_size": 6, "target_modules": ["o_proj"]}, 2, 12
        ),
        case("prefix", {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5}, 1, 10),
        case("pruned", {"peft_type": "DIFF_PRUNING", "sparsity": 0.9, "target_modules": ["v_proj"]}, 3, 8),
        case(
            "scales",
            {
                "peft_type": "IA3",
                "target_modules": ["k_proj", "down_proj"],
                "feedforward_modules": ["down_proj"],
            },
            1,
            11,
        ),
    ]


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("tied", lambda directory: tiny_models.make(directory, "llama-tied")) / "llama-tied"


def _joined(joined: Callable[..., Parallel], layout: str) -> Parallel:
    return joined(*LAYOUTS[layout][:3])


def _alone(joined: Callable[..., Parallel]) -> Parallel:
    """This process as the whole world."""
    here = joined(1, 1)
    return replace(here, rank=0, world_size=1, dp_rank=0, dp_size=1, dp_group=here.tp_group)


def _train(
    path: Path, parallel: Parallel, policy: str, kind: Kind, recompute: Recompute, split: Split = ()
) -> tuple[Losses, dict[str, Tensor]]:
    cases = _cases()
    stages = load_stages(path, parallel, torch.float64, recompute, split or None, kind)
    engine = Engine(stages, parallel, planning_of(policy, stages[0], parallel, cases, split))
    engine.register_tasks([case.task for case in cases])
    taken = [engine.step()]
    while len(taken) < STEPS:
        taken += engine.steps(STEPS - len(taken))
    groups = [group for stage in stages for group in stage.offload.groups.values()]
    assert {bytes_of(group).whole.untyped_storage().nbytes() for group in groups} <= {0}
    tensors = {case.name: engine.adapter_tensors(case.name) or {} for case in cases}
    losses = [{name: (r.loss, r.grad_norm) for name, r in step.items()} for step in taken]
    return losses, {f"{name}/{key}": tensor for name, own in tensors.items() for key, tensor in own.items()}


def _none_on_any_rank(problems: list[str]) -> None:
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, problems)
    assert not any(everyone), "\n".join(problem for rank in everyone for problem in rank[:20])


@pytest.fixture(scope="module")
def wanted(path: Path, joined: Callable[..., Parallel]) -> tuple[Losses, dict[str, Tensor]]:
    """What one process makes of the tasks."""
    return _train(path, _alone(joined), "spatial", "resident", "none")


@pytest.mark.parametrize(
    ("layout", "kind", "policy", "recompute"),
    [
        ("DP4", "sharded", "temporal", "none"),
        ("DP4", "sharded-offloaded", "side by side", "full"),
        ("DP4", "offloaded", "chunks", "none"),
        ("TP2xDP2", "sharded", "side by side", "none"),
        ("TP2xDP2", "sharded-offloaded", "chunks", "full"),
        ("SP2xDP2", "sharded", "chunks", "full"),
        ("PP2xDP2", "sharded-offloaded", "side by side", "none"),
        ("PP2xDP2", "offloaded", "temporal", "none"),
        ("virtual PP2xDP2", "sharded", "chunks", "none"),
        ("virtual PP2xDP2", "sharded-offloaded", "temporal", "full"),
    ],
)
def test_tasks_come_out_as_from_one_process(
    layout: str,
    kind: Kind,
    policy: str,
    recompute: Recompute,
    wanted: tuple[Losses, dict[str, Tensor]],
    path: Path,
    joined: Callable[..., Parallel],
) -> None:
    losses, found = _train(path, _joined(joined, layout), policy, kind, recompute, LAYOUTS[layout].split)
    problems = [
        f"{name} step {step}: {own[name]} != {expected[name]}"
        for step, (own, expected) in enumerate(zip(losses, wanted[0], strict=True))
        for name in expected
        if own[name] != pytest.approx(expected[name], rel=2e-6)
    ]
    if dist.get_rank() == 0:
        problems += [key for key, tensor in wanted[1].items() if not relative(found[key], tensor) <= 1e-9]
    _none_on_any_rank(problems)


@pytest.mark.parametrize(("layout", "choices"), [("DP4", 3), ("PP2xDP2", 0)])
def test_an_evaluation_finds_the_same(
    layout: str,
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

    wanted = result(_alone(joined), "resident")
    found = result(_joined(joined, layout), "sharded")
    same = found.loss == pytest.approx(wanted.loss, rel=1e-9) and found.accuracy == wanted.accuracy
    _none_on_any_rank([] if same and found.records == COUNT else [f"{found} != {wanted}"])


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
    engine.register_tasks([case.task for case in _cases()[:2]])
    engine.step()
    if most != 2:
        problems.append(f"{most} units at once")
    _none_on_any_rank(problems)
