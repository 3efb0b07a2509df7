"""Steps taken without a flush between them are the steps taken one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_mux.engine import Engine, Planning, StepResult
from megatron_mux.runtime import Parallel
from tests.end_to_end.conftest import BackboneOf
from tests.end_to_end.families import FAMILIES, diff_pruning, lora
from tests.end_to_end.harness import Case, random_records

pytestmark = pytest.mark.versions

Tensors = dict[str, dict[str, torch.Tensor]]


def cases_of(spoilt: bool = False) -> list[Case]:
    targets = FAMILIES["llama"]
    adapters = {
        "lora": (lora(targets.query_value, r=4, lora_dropout=0.2), 6),
        "pruned": (diff_pruning(targets.query_value), 4),
        "wild": (lora(targets.query_value, r=2, lora_alpha=1e6 if spoilt else 8), 9),
    }
    cases = []
    for i, (name, (adapter, steps)) in enumerate(adapters.items()):
        rate = 1e308 if spoilt and name == "wild" else 1e-2
        training: dict[str, Any] = {
            "per_device_train_batch_size": 3,
            "learning_rate": rate,
            "max_steps": steps,
        }
        training |= {"optim": "sgd", "max_grad_norm": 0.0} if name == "wild" else {}
        cases.append(Case(name, adapter, training, random_records(10, 96, 4, 12, seed=i)))
    return cases


def trained(
    backbone_of: BackboneOf, parallel: Parallel, policy: str, most: int, spoilt: bool = False
) -> tuple[dict[str, list[StepResult]], Tensors, list[int]]:
    """Every task to its end, so many steps at a time at the most."""
    engine = Engine(backbone_of("llama", torch.float64), parallel, Planning(policy, 1))  # type: ignore[arg-type]
    engine.register_tasks([case.task for case in cases_of(spoilt)])
    results: dict[str, list[StepResult]] = {name: [] for name in engine.tasks}
    taken = []
    while engine.active:
        steps = engine.steps(most)
        taken.append(len(steps))
        for step in steps:
            for name, result in step.items():
                results[name].append(result)
    tensors = {name: engine.adapter_tensors(name) or {} for name in engine.tasks}
    for name in engine.tasks:
        engine.remove_task(name)
    return results, tensors, taken


@pytest.mark.parametrize("policy", ["temporal", "spatial", "serial"])
def test_rolling_changes_no_bit(policy: str, backbone_of: BackboneOf, parallel: Parallel) -> None:
    wanted, adapters, single = trained(backbone_of, parallel, policy, 1)
    assert set(single) == {1}
    for most in (3, 100):
        found, tensors, taken = trained(backbone_of, parallel, policy, most)
        assert found == wanted, "losses, norms, rates and statuses"
        assert max(taken) == (3 if most == 3 else 9 if policy == "serial" else 4), "until a task is finished"
        for name, own in adapters.items():
            assert all(torch.equal(tensors[name][key], value) for key, value in own.items())


def test_a_task_that_diverges_amid_steps_harms_nobody(backbone_of: BackboneOf, parallel: Parallel) -> None:
    wanted, adapters, _ = trained(backbone_of, parallel, "spatial", 1, spoilt=True)
    found, tensors, taken = trained(backbone_of, parallel, "spatial", 100, spoilt=True)
    assert wanted["wild"][-1].status == "failed" and len(wanted["wild"]) < 4 <= taken[0]
    for name, own in adapters.items():
        assert [(r.step, r.status) for r in found[name]] == [(r.step, r.status) for r in wanted[name]]
        assert [r.loss for r in found[name]] == pytest.approx([r.loss for r in wanted[name]], nan_ok=True)
        for key, value in own.items():
            assert tensors[name][key] == pytest.approx(value, rel=1e-10)
