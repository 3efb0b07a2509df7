"""However experts and the rest of the backbone are divided, a task's adapter comes out the same, fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_mux.backbone.model import Recompute, load_stages
from megatron_mux.backbone.registry import read_shape
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine, Planning
from megatron_mux.engine.expert_moves import place_experts
from megatron_mux.expert_shape import Placement
from megatron_mux.runtime import Parallel
from tests.distributed.test_experts import scattered
from tests.end_to_end.harness import Case, assert_close, random_records

STEPS = 3
Trained = tuple[list[dict[str, tuple[float, ...]]], dict[str, dict[str, Tensor] | None]]
"""Results of each step, and by task its adapter where this rank has it."""


class Layout(NamedTuple):
    """How four processes are divided, and what else may differ."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int = 1
    split: tuple[int, ...] = ()
    recompute: Recompute = "none"
    residence: Kind = "resident"
    scattered: bool = False
    policy: Literal["spatial", "temporal"] = "spatial"
    managers: int = 0


LAYOUTS = [
    Layout(1, 1, 2),
    Layout(1, 1, 4, scattered=True),
    Layout(1, 1, 2, 2, recompute="full"),
    Layout(1, 2, 2, split=(1, 1, 1, 1), policy="temporal"),
    Layout(2, 1, 1, 2, scattered=True),
    Layout(2, 1, 2, 2),
    Layout(2, 2, 2, recompute="full", residence="offloaded", scattered=True),
]


def cases_of(vocab: int, balanced: bool = False) -> list[Case]:
    """Tasks of many kinds; some with a balancing loss, if wanted."""

    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 8, "seed": 3}

    def case(name: str, adapter: dict[str, object], records: int, longest: int, **training: object) -> Case:
        recipe: dict[str, object] = {**usual, **training}
        if balanced and name in ("lora", "few_experts"):
            recipe["router_aux_loss_coef"] = 0.2
        return Case(name, adapter, recipe, random_records(records, vocab, 3, longest, seed=len(name)))

    def lora(r: int, modules: object, **more: object) -> dict[str, object]:
        return {"peft_type": "LORA", "r": r, "target_modules": modules, **more}

    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    bottleneck = {"peft_type": "BOTTLENECK", "bottleneck_size": 6, "target_modules": ["o_proj"]}
    few = lora(5, ".*layers[.]3[.].*q_proj", target_parameters=["down_proj"])
    return [
        case("lora", lora(4, ["q_proj", "v_proj"], lora_dropout=0.1), 9, 16),
        # On a layer that not every task has adapters below.
        case("high", lora(3, ".*layers[.]2[.].*o_proj"), 3, 9),
        case("experts", lora(3, ["q_proj"], target_parameters=both), 8, 14),
        case("few_experts", few, 3, 6, max_grad_norm=0.01),
        case("bottle", bottleneck, 5, 12),
        case("prefix", {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5}, 3, 10),
        case("linear", {"peft_type": "VERA", "r": 6, "target_modules": "all-linear"}, 7, 11),
    ]


_LATENT = {"q_proj": ["q_a_proj", "q_b_proj"], "v_proj": ["kv_a_proj_with_mqa", "kv_b_proj"]}


def of_latent_attention(case: Case) -> Case:
    """The case with the modules of latent attention, which has no prefixes."""
    adapter, targets = dict(case.adapter), case.adapter.get("target_modules")
    if adapter["peft_type"] == "PREFIX_TUNING":
        adapter = {"peft_type": "IA3", "target_modules": ["kv_a_proj_with_mqa", "q_b_proj"]}
        adapter["feedforward_modules"] = ["q_b_proj"]
    elif isinstance(targets, list):
        adapter["target_modules"] = [own for name in targets for own in _LATENT.get(name, [name])]
    elif targets is not None:
        adapter["target_modules"] = targets.replace("q_proj", "q_a_proj")
    if "target_parameters" in adapter:
        adapter["target_parameters"] = [*adapter["target_parameters"], "shared_experts.up_proj.weight"]
    return replace(case, adapter=adapter)


def train(
    joined: Callable[..., Parallel],
    path: Path,
    cases: list[Case],
    layout: Layout,
    placement: Placement | None = None,
    then: Sequence[Placement] = (),
) -> Trained:
    sizes = (layout.tensor, layout.pipeline, layout.tensor > 1, layout.expert, layout.expert_tensor)
    parallel = joined(*sizes, layout.managers)
    if layout.scattered and placement is None:
        placement = scattered(read_shape(path), layout.expert)
    kept = (layout.recompute, layout.split or None, layout.residence)
    stages = load_stages(path, parallel, torch.float64, *kept, placement=placement)
    virtual = len(layout.split) // layout.pipeline or 1
    planning = Planning(layout.policy, stages=layout.pipeline * virtual, virtual=virtual, split=layout.split)
    engine = Engine(stages, parallel, planning)
    engine.register_tasks([case.task for case in cases])
    taken = engine.steps(STEPS - len(then))
    for other in then:
        place_experts(engine, other)
        taken.append(engine.step())
    while len(taken) < STEPS:
        taken += engine.steps(STEPS - len(taken))
    results: list[dict[str, tuple[float, ...]]] = [
        {n: (r.loss, r.grad_norm, r.tokens, r.router_aux_loss or 0.0) for n, r in step.items()}
        for step in taken
    ]
    return results, {case.name: engine.adapter_tensors(case.name) for case in cases}


def assert_alike(found: Trained, wanted: Trained, tolerance: float, about: object) -> None:
    """Results of all steps, and adapters where both have them, agree."""
    for step, (ours, theirs) in enumerate(zip(found[0], wanted[0], strict=True)):
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance), (about, step, name)
    for name, tensors in found[1].items():
        reference = wanted[1][name]
        if tensors is not None and reference is not None:
            assert_close(tensors, reference, tolerance, f"{about} {name}")


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("mixtral", LAYOUTS),
        ("qwen3_moe", [*LAYOUTS[1::3], LAYOUTS[6]]),
        ("deepseek_v3", LAYOUTS[1::2]),
    ],
)
def test_every_layout_gives_the_same_adapters(
    family: str,
    layouts: list[Layout],
    model_of: Callable[[str], Path],
    joined: Callable[..., Parallel],
) -> None:
    path = model_of(family)
    every = cases_of(96, balanced=family != "mixtral")
    if family == "deepseek_v3":
        every = [of_latent_attention(case) for case in every]
    without = [case for case in every if "target_parameters" not in case.adapter]
    whole = {len(cases): train(joined, path, cases, Layout(1, 1, 1)) for cases in (every, without)}
    for layout in layouts:
        cases = without if layout.expert_tensor > 1 else every
        assert_alike(train(joined, path, cases, layout), whole[len(cases)], 1e-9, layout)
