"""The balancing loss of a task's experts: as Megatron-Core and autograd have it, whatever else is computed beside."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Planning
from megatron_mux.runtime import Parallel
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.families import lora
from tests.end_to_end.harness import Case, Trained, assert_close, random_records, train
from tests.end_to_end.test_isolation import rows_become
from tests.reference import peft_solo, solo
from tests.reference.balanced import Balancing
from tests.reference.loop import Recipe
from tests.reference.loop import train as train_reference

STEPS = 6
CLOSE = 1e-5  # fp32
ALONE = 1e-9  # fp64
SGD = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}


def case_of(
    name: str, adapter: dict[str, Any], coefficient: float, batch: int, shortest: int, longest: int
) -> Case:
    training = {
        **SGD,
        "per_device_train_batch_size": batch,
        "max_steps": STEPS,
        "router_aux_loss_coef": coefficient,
    }
    return Case(name, adapter, training, random_records(11, 96, shortest, longest, seed=len(name)))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_as_megatrons_formula_on_the_routers_of_transformers(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    """Losses, gradient norms and adapters, together with a task that does not ask for it."""
    path = path_of(family)
    names = ["q_proj", "v_proj"] if family == "mixtral" else ["q_b_proj", "kv_b_proj"]
    cases = [
        case_of("one", lora(names, r=4), 0.3, 1, 8, 24),
        case_of("plain", lora(["o_proj"], r=3), 0.0, 2, 4, 12),
        case_of("several", lora(["o_proj"], r=4), 2.0, 4, 3, 16),
    ]
    for i, case in enumerate(cases):
        case.initial = solo.random_adapter(path, case.adapter, seed=i)
    together = train(backbone_of(family), parallel, cases, STEPS)
    for case in cases:
        assert case.initial is not None
        steps, coefficient = case.steps(STEPS), case.training["router_aux_loss_coef"]
        model = peft_solo.wrap(peft_solo.load_model(path), case.adapter, case.initial)
        penalty = Balancing(model, steps, coefficient) if coefficient else None
        wanted = train_reference(
            model,
            peft_solo.trainable(model),
            steps,
            Recipe.of(case.training),
            lambda model=model: peft_solo.export(model),  # type: ignore[misc]
            penalty,
        )
        found = together.results[case.name]
        assert [result.loss for result in found] == pytest.approx(wanted.losses, rel=CLOSE), case.name
        assert [result.grad_norm for result in found] == pytest.approx(wanted.grad_norms, rel=CLOSE), (
            case.name
        )
        balancing = [result.router_aux_loss for result in found]
        assert balancing == (pytest.approx(penalty.losses, rel=CLOSE) if penalty else [None] * STEPS)
        assert_close(together.tensors[case.name], wanted.tensors, CLOSE, case.name)


def together_and_alone() -> list[Case]:
    """Two tasks that ask for it, one of them with adapters on experts and in upper layers only; two that do not."""
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    return [
        case_of("first", lora(["q_proj"], r=3, lora_dropout=0.2), 0.5, 3, 4, 24),
        case_of("second", lora(".*layers[.][23][.].*v_proj", r=3, **experts), 3.0, 4, 3, 9),
        case_of("plain", lora(["o_proj"], r=4), 0.0, 3, 4, 24),
        case_of("poisoned", lora(["v_proj"], r=4), 0.7, 2, 4, 24),
    ]


@pytest.fixture(scope="module")
def alone(backbone_of: BackboneOf, parallel: Parallel) -> dict[str, Trained]:
    backbone = backbone_of("mixtral", torch.float64)
    return {case.name: train(backbone, parallel, [case], 2) for case in together_and_alone()}


def assert_as_alone(found: Trained, alone: dict[str, Trained], name: str) -> None:
    for ours, theirs in zip(found.results[name], alone[name].results[name], strict=True):
        numbers = [(r.loss, r.grad_norm, r.router_aux_loss or 0.0) for r in (ours, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], rel=ALONE), name
        assert (ours.router_aux_loss is None) == (name == "plain")
    assert_close(found.tensors[name], alone[name].tensors[name], ALONE, name)


@pytest.mark.parametrize(
    ("how", "recompute"),
    [
        ({}, "none"),
        ({"micro_batches": 3}, "full"),
        ({"micro_batches": 2, "chunk": 4, "alignment": "longest"}, "full"),
    ],
    ids=["together", "micro-batches, recomputed", "padded chunks, recomputed"],
)
def test_together_as_alone(
    how: dict[str, Any],
    recompute: Any,
    alone: dict[str, Trained],
    backbone_of: BackboneOf,
    path_of: PathOf,
    parallel: Parallel,
) -> None:
    backbone = backbone_of("mixtral", torch.float64)
    if recompute != "none":
        backbone = Backbone.load(path_of("mixtral"), parallel, torch.float64, recompute)
    cases = together_and_alone()
    found = train(backbone, parallel, cases, 2, planning=Planning("spatial", 1, **how))
    for case in cases:
        assert_as_alone(found, alone, case.name)


def test_a_poisoned_neighbour_changes_nothing(
    alone: dict[str, Trained], backbone_of: BackboneOf, parallel: Parallel
) -> None:
    backbone, cases = backbone_of("mixtral", torch.float64), together_and_alone()
    with rows_become(backbone, "first layer", "poisoned", math.nan):
        found = train(backbone, parallel, cases, 2)
    assert [result.status for result in found.results["poisoned"]] == ["failed"]
    for name in ("first", "second", "plain"):
        assert_as_alone(found, alone, name)


def test_a_task_without_it_gets_what_it_always_got(
    backbone_of: BackboneOf, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is computed: to the bit the same, and no operator more."""

    def never(*_: Any) -> Tensor:
        raise AssertionError("a balancing loss is computed")

    monkeypatch.setattr("megatron_mux.backbone.experts.router.Router._ranked", never)
    case = case_of("plain", lora(["o_proj"], r=4), 0.0, 3, 4, 24)
    assert train(backbone_of("mixtral"), parallel, [case], 1).results["plain"][0].router_aux_loss is None
