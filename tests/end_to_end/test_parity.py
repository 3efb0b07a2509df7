"""Trained together, every task comes out as if it had been trained alone by somebody else's code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Planning
from megatron_mux.fusion.plan import Policy
from megatron_mux.runtime import Parallel
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.families import (
    FAMILIES,
    Targets,
    bottleneck,
    diff_pruning,
    ia3,
    loha,
    lora,
    prefix,
    vera,
)
from tests.end_to_end.harness import Case, Trained, assert_close, random_records, train
from tests.reference import plain, solo
from tests.reference.loop import SoloResult

pytestmark = pytest.mark.versions

STEPS = 20
FEWER = 8  # where a family's modules are what is compared: one family of each kind goes on for all steps
LOSS = 1e-4  # relative, every step
ADAPTER = 2e-3  # relative Frobenius norm of every tensor after the last step
VOCABULARY = 96  # of the smallest tiny model

# Batch size, accumulation, optimizer, schedule, clipping: no two tasks alike.
RECIPES = (
    {
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
    },
    {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.05,
        "max_grad_norm": 0.5,
        "adam_beta2": 0.98,
    },
    {
        "per_device_train_batch_size": 3,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
    },
    {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
    },
)
# Shortest and longest record, and how many: the passes end at different steps, some with a short batch.
SIZES = ((4, 10, 37), (6, 30, 20), (20, 40, 9), (3, 22, 11))


def make_case(i: int, path: Path, adapter: dict[str, object], steps: int = STEPS) -> Case:
    """The `i`-th task of a test: its own recipe, lengths and initial adapter, in which nothing is zero."""
    shortest, longest, count = SIZES[i % len(SIZES)]
    training = {**RECIPES[i % len(RECIPES)], "max_steps": steps, "seed": i}
    records = random_records(count, VOCABULARY, shortest, longest, seed=100 + i)
    return Case(f"task-{i}", adapter, training, records, solo.random_adapter(path, adapter, seed=i))


def alone(path: Path, case: Case) -> SoloResult:
    """What the reference makes of a task."""
    count = case.spec.training.max_steps
    assert case.initial is not None and count is not None
    steps = case.steps(count)
    return solo.train_solo(path, case.adapter, case.training, steps, case.initial)


def compare(together: Trained, wanted: SoloResult, case: Case) -> None:
    """Loss and learning rate of every step, gradient norm, and the adapter at the end."""
    results = together.results[case.name]
    assert len(results) == len(wanted.losses)
    for step, (result, loss, norm, rate) in enumerate(
        zip(results, wanted.losses, wanted.grad_norms, wanted.learning_rates, strict=True)
    ):
        at = f"{case.name} step {step + 1}"
        assert result.learning_rate == pytest.approx(rate, rel=1e-9, abs=1e-15), at
        assert result.loss == pytest.approx(loss, rel=LOSS), at
        assert result.grad_norm == pytest.approx(norm, rel=2e-3), at
        assert result.tokens == sum(len(tokens) for tokens, _ in case.steps(step + 1)[step]), at
    assert results[-1].status == "finished"
    assert_close(together.tensors[case.name], wanted.tensors, ADAPTER, case.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_tasks_together_are_as_with_peft_alone(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    targets, path = FAMILIES[family], path_of(family)
    adapters = (
        lora(targets.query_value, r=4),
        lora(targets.others, r=8, use_rslora=True),
        lora("all-linear", r=3),
        lora(targets.mixed, r=16, lora_alpha=4),
    )
    check(path, backbone_of(family), parallel, adapters, STEPS if family == "llama" else FEWER)


def check(
    path: Path, backbone: Backbone, parallel: Parallel, adapters: Sequence[dict[str, Any]], steps: int
) -> None:
    """Train a task with each of the adapters, all together, and compare each with the reference."""
    cases = [make_case(i, path, adapter, steps) for i, adapter in enumerate(adapters)]
    together = train(backbone, parallel, cases, steps)
    for case in cases:
        compare(together, alone(path, case), case)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_lora_of_latent_attention_shared_and_routed_experts_is_as_with_peft_alone(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    path = path_of(family)
    queries = ["q_proj"] if family == "deepseek_v2" else ["q_a_proj", "q_b_proj"]
    shared = [f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
    adapters = (
        lora([*queries, "kv_b_proj"], r=4),
        lora([*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], r=8, use_rslora=True),
        lora(["kv_a_proj_with_mqa"], r=3, target_parameters=[*shared, "experts.down_proj", "gate_up_proj"]),
        lora(["o_proj"], r=6, target_parameters=["mlp.up_proj.weight", shared[1]], lora_alpha=3),
    )
    check(path, backbone_of(family), parallel, adapters, FEWER)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_lora_of_attention_and_experts_together_is_as_with_peft_alone(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    path = path_of(family)
    adapters = (
        lora(["q_proj", "v_proj"], r=4),
        lora(["k_proj", "o_proj"], r=8, use_rslora=True),
        lora(["q_proj", "k_proj", "v_proj", "o_proj"], r=16, lora_alpha=4),
        lora(["v_proj"], r=3, target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]),
        lora(["o_proj"], r=6, target_parameters=["experts.down_proj"], lora_alpha=3),
        lora(["q_proj"], r=4, target_parameters=["gate_up_proj"], use_rslora=True),
    )
    check(path, backbone_of(family), parallel, adapters, STEPS if family == "mixtral" else FEWER)


def other_kinds(targets: Targets) -> list[dict[str, Any]]:
    """Adapter sections of every kind."""
    of_linear = [] if targets.transposed else [loha("all-linear"), loha(targets.mixed, r=2, alpha=1)]
    return [
        *of_linear,
        ia3(targets),
        prefix(5),
        bottleneck(targets.outputs, non_linearity="gelu", scaling=0.5),
        diff_pruning(targets.query_value, l0_weight=1e-4),
        lora(targets.query_value, r=4),
        bottleneck(targets.outputs[:1], size=5),
        vera("all-linear"),
        vera(targets.mixed, r=8, save_projection=False, projection_prng_key=3),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_other_kinds_together_are_as_alone(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    steps = STEPS if family == "llama" else FEWER
    check(path_of(family), backbone_of(family), parallel, other_kinds(FAMILIES[family]), steps)


@pytest.mark.parametrize("policy", ["serial", "temporal"])
def test_policies_agree_with_the_reference(
    policy: Policy, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    targets, path = FAMILIES["llama"], path_of("llama")
    cases = [make_case(i, path, lora(targets.query_value, r=4 + 2 * i)) for i in range(2)]
    steps = STEPS * len(cases) if policy == "serial" else STEPS
    together = train(backbone_of("llama"), parallel, cases, steps, planning=Planning(policy, 1))
    for case in cases:
        compare(together, alone(path, case), case)


def test_diff_pruning_ends_at_its_sparsity(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    wanted = 0.9
    case = make_case(0, path_of("llama"), diff_pruning(FAMILIES["llama"].mixed, sparsity=wanted))
    together = train(backbone_of("llama"), parallel, [case], STEPS)
    difference = plain.final_difference(together.tensors[case.name])
    zeros = sum(int((value == 0).sum()) for value in difference.values())
    assert zeros / sum(value.numel() for value in difference.values()) == pytest.approx(wanted, abs=0.005)
    assert any(bool((value != 0).any()) for value in difference.values())
