"""Whatever happens to one task, the others' numbers do not know."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import active
from megatron_mux.engine import Engine, Planning
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
from tests.end_to_end.harness import (
    Case,
    Trained,
    adapter,
    assert_close,
    assert_same,
    engine_logits,
    random_records,
    train,
)
from tests.reference import solo

EXACT = 1e-10  # fp64
SMOLLM2 = Path(os.environ.get("SMOLLM2", ".quickstart/backbone"))
VOCABULARY = 96
ALONE = ("llama", "gpt2", "gemma3_text")  # transposed weights, a sliding window
PLAIN_SGD = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
ADAMW = {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}


def kinds(targets: Targets) -> dict[str, dict[str, Any]]:
    """One adapter section of every kind; they share modules with each other."""
    return {
        "lora": lora(targets.query_value, r=5),
        "lora-everywhere": lora("all-linear", r=3, use_rslora=True),
        "bottleneck": bottleneck(targets.outputs, non_linearity="tanh", scaling=0.7),
        "diff-pruning": diff_pruning(targets.mixed, l0_weight=1e-4),
        "prefix": prefix(4),
        "ia3": ia3(targets),
        "dora": lora(targets.mixed, r=4, use_dora=True, rank_pattern={targets.mixed[0]: 6}),
        **({} if targets.transposed else {"loha": loha("all-linear", r=3)}),
        # Of fixed matrices there is no gradient to compare.
        "vera": vera(targets.mixed, save_projection=False),
    }


def make_cases(
    path: Path,
    sections: dict[str, dict[str, Any]],
    training: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    lengths: tuple[int, int] = (4, 24),
) -> dict[str, Case]:
    """A task of each section, with records (of so many tokens) and initial adapters of their own."""
    return {
        name: Case(
            name,
            section,
            {"per_device_train_batch_size": 2, "max_steps": 50, "seed": i, **training},
            random_records(13, VOCABULARY, *lengths, seed=i),
            solo.random_adapter(path, section, seed=i, dtype=dtype),
        )
        for i, (name, section) in enumerate(sections.items())
    }


def moved(
    backbone: Backbone, parallel: Parallel, cases: list[Case], **engine: Any
) -> dict[str, dict[str, Tensor]]:
    """How far one step of plain SGD at rate 1 moves each adapter: its gradient."""
    after = train(backbone, parallel, cases, 1, **engine).tensors
    gradients = {}
    for case in cases:
        assert case.initial is not None
        gradients[case.name] = {key: case.initial[key] - value for key, value in after[case.name].items()}
        for key, gradient in gradients[case.name].items():
            assert gradient.isfinite().all() and gradient.norm() > 0, f"{case.name}: {key} tells nothing"
    return gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_together_are_those_alone(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    """Each task by itself with families whose attention and modules differ most, thirds of them with others."""
    backbone = backbone_of(family, torch.float64)
    cases = make_cases(path_of(family), kinds(FAMILIES[family]), PLAIN_SGD)
    together = moved(backbone, parallel, list(cases.values()))
    parts = len(cases) if family in ALONE else 3
    for part in (list(cases.values())[i::parts] for i in range(parts)):
        for name, alone in moved(backbone, parallel, part).items():
            assert_close(together[name], alone, EXACT, name)


@pytest.fixture(scope="module")
def usual(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> tuple[dict[str, Case], dict[str, dict[str, Tensor]]]:
    """Tasks of all kinds that accumulate, and their gradients under the plan that an engine makes by itself."""
    training = {**PLAIN_SGD, "gradient_accumulation_steps": 2}
    sections = kinds(FAMILIES["llama"]) | {"dropout": lora(FAMILIES["llama"].mixed, lora_dropout=0.4)}
    cases = make_cases(path_of("llama"), sections, training)
    return cases, moved(backbone_of("llama", torch.float64), parallel, list(cases.values()))


@pytest.mark.parametrize(
    "how",
    [
        Planning("spatial", 1, micro_batches=3),
        Planning("temporal", 1),
        Planning("spatial", 1, chunk=3),
        Planning("temporal", 1, micro_batches=2, chunk=4, alignment="longest"),
    ],
)
def test_gradients_do_not_depend_on_the_plan(
    how: Planning,
    usual: tuple[dict[str, Case], dict[str, dict[str, Tensor]]],
    backbone_of: BackboneOf,
    parallel: Parallel,
) -> None:
    cases, wanted = usual
    backbone = backbone_of("llama", torch.float64)
    other = moved(backbone, parallel, list(cases.values()), planning=how)
    for name in cases:
        assert_close(other[name], wanted[name], EXACT, name)


def test_dropout_masks_together_are_those_alone(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    backbone = backbone_of("llama", torch.float64)
    targets = FAMILIES["llama"]
    sections = {
        "before": lora(targets.query_value, r=4, lora_dropout=0.2),
        "observed": lora(targets.mixed, r=6, lora_dropout=0.5),
        "after": lora("all-linear", r=2, lora_dropout=0.1),
    }
    cases = make_cases(path_of("llama"), sections, ADAMW)
    together = train(backbone, parallel, list(cases.values()), 4)
    for name, case in cases.items():
        alone = train(backbone, parallel, [case], 4)
        assert together.losses(name) == pytest.approx(alone.losses(name), rel=1e-6), name  # reported in fp32
        assert_close(together.tensors[name], alone.tensors[name], 1e-9, name)
    observed = cases["observed"]
    dry = Case(
        "dry",
        {**observed.adapter, "lora_dropout": 0.0},
        observed.training,
        observed.records,
        observed.initial,
    )
    without = train(backbone, parallel, [dry], 4).losses("dry")
    assert all(abs(a - b) > 1e-6 * abs(b) for a, b in zip(together.losses("observed"), without, strict=True))


def test_dropout_changes_from_step_to_step_and_with_the_seed(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    section = lora(FAMILIES["llama"].mixed, lora_dropout=0.5)
    case = make_cases(path_of("llama"), {"same": section}, {**PLAIN_SGD, "learning_rate": 1e-30})["same"]
    case.records.pairs = case.records.pairs[:2]  # every step sees the same records with the same adapter
    backbone = backbone_of("llama", torch.float64)
    losses = train(backbone, parallel, [case], 3).losses("same")
    assert len({round(loss, 6) for loss in losses}) == 3
    other = Case("same", section, {**case.training, "seed": 77}, case.records, case.initial)
    assert train(backbone, parallel, [other], 1).losses("same")[0] != pytest.approx(losses[0], rel=1e-6)


Poison = Callable[[Backbone, Case], Any]


@contextmanager
def rows_become(backbone: Backbone, module: str, name: str, value: float) -> Iterator[None]:
    """Within, the rows of task `name` are `value` at the entry of the first layer's attention or behind the last."""

    def spoil(hidden: Tensor) -> Tensor:
        rows = active().task_rows.get(name)
        if rows is None:
            return hidden
        keep = torch.ones(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        keep[rows[0] : rows[1]] = False
        return torch.where(keep[:, None, None], hidden, torch.full_like(hidden, value))

    decoder: Any = backbone.model.decoder
    if module == "first layer":
        attention = decoder.layers[0].self_attention
        handle = attention.register_forward_pre_hook(lambda module, inputs: (spoil(inputs[0]), *inputs[1:]))
    else:
        handle = decoder.final_layernorm.register_forward_hook(lambda module, inputs, output: spoil(output))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def tensors_become(case: Case, which: str, value: float) -> Iterator[None]:
    """Within, the task starts with some of its tensors spoiled."""
    assert case.initial is not None
    before = dict(case.initial)
    spoiled = [key for key in before if which in key]
    assert spoiled
    case.initial |= {key: torch.full_like(before[key], value) for key in spoiled}
    try:
        yield
    finally:
        case.initial = before


POISONS: dict[str, Poison] = {
    "rows are NaN": lambda backbone, case: rows_become(backbone, "first layer", case.name, math.nan),
    "rows are Inf": lambda backbone, case: rows_become(backbone, "first layer", case.name, math.inf),
    "loss is NaN": lambda backbone, case: rows_become(backbone, "final norm", case.name, math.nan),
    "loss is Inf": lambda backbone, case: rows_become(backbone, "final norm", case.name, -math.inf),
    "A is NaN": lambda backbone, case: tensors_become(case, "lora_A", math.nan),
    "A is Inf": lambda backbone, case: tensors_become(case, "lora_A", math.inf),
    "B is NaN": lambda backbone, case: tensors_become(case, "lora_B", math.nan),
    "B is Inf": lambda backbone, case: tensors_become(case, "lora_B", -math.inf),
}


@pytest.mark.parametrize("lengths", [(12, 12), (4, 24)], ids=["equal", "uneven"])
@pytest.mark.parametrize(
    ("poison", "dtype"),
    [(poison, (torch.float32, torch.float64)[i // 2 % 2]) for i, poison in enumerate(POISONS)],
)
def test_a_poisoned_neighbour_changes_nothing(
    poison: str,
    dtype: torch.dtype,
    lengths: tuple[int, int],
    backbone_of: BackboneOf,
    path_of: PathOf,
    parallel: Parallel,
    known: Known,
) -> None:
    """Also where sequences of several tasks have one length and so may share a call of attention."""
    all_kinds = kinds(FAMILIES["llama"])
    poisoned = {"poisoned": lora(FAMILIES["llama"].query_value, r=4)}
    before = {name: all_kinds[name] for name in ("lora", "prefix", "diff-pruning")}
    after = {name: all_kinds[name] for name in ("lora-everywhere", "bottleneck", "ia3")}
    cases = make_cases(path_of("llama"), before | poisoned | after, ADAMW, dtype, lengths)
    about = f"{dtype} {lengths}"
    check_victims(backbone_of("llama", dtype), parallel, cases, POISONS[poison], known, (about, about))


@pytest.mark.parametrize(
    ("kind", "value"),
    [(kind, (math.nan, math.inf)[i % 2]) for i, kind in enumerate(kinds(FAMILIES["llama"]))],
)
def test_a_poisoned_adapter_of_any_kind_changes_nothing(
    kind: str, value: float, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel, known: Known
) -> None:
    all_kinds = kinds(FAMILIES["llama"])
    sections = {"first": all_kinds["lora"], "poisoned": all_kinds[kind]} | all_kinds
    cases = make_cases(path_of("llama"), sections, ADAMW, torch.float32)
    check_victims(
        backbone_of("llama", torch.float32),
        parallel,
        cases,
        lambda backbone, case: tensors_become(case, "", value),
        known,
        (f"beside {kind}", "beside each other"),
    )


def test_a_poisoned_task_in_the_same_experts_changes_nothing(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    """To rounding: where rows that are not finite go decides how many share a product."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    sections = {name: lora(["q_proj"], r=3, target_parameters=parameters) for name in ("own", "poisoned")}
    backbone = backbone_of("mixtral", torch.float64)
    cases = make_cases(path_of("mixtral"), sections, ADAMW)
    alone = train(backbone, parallel, [cases["own"]], 3)
    with tensors_become(cases["poisoned"], "experts", math.nan):
        beside = train(backbone, parallel, list(cases.values()), 3)
    assert beside.results["poisoned"][0].status == "failed"
    assert beside.losses("own") == pytest.approx(alone.losses("own"), rel=1e-12)
    assert_close(beside.tensors["own"], alone.tensors["own"], 1e-10, "own")


Known = dict[tuple[str, str], Trained]


@pytest.fixture(scope="module")
def known() -> Known:
    """What victims come to without a poison, trained once for all cases that compare with it."""
    return {}


def check_victims(
    backbone: Backbone,
    parallel: Parallel,
    cases: dict[str, Case],
    poison: Poison,
    known: Known,
    names: tuple[str, str],
) -> None:
    """Beside the poisoned task, and once it was stopped, the others are as beside a healthy one.

    Args:
        backbone, parallel, cases, poison: What is trained.
        known: See the fixture.
        names: Of all these tasks together, and of the victims by themselves, in `known`.
    """
    victims = {name: case for name, case in cases.items() if name != "poisoned"}
    for part, own, steps in ((0, cases, 1), (1, victims, 3)):
        key = ("all", "victims")[part], names[part]
        if key not in known:
            known[key] = train(backbone, parallel, list(own.values()), steps)
    healthy, without = known["all", names[0]], known["victims", names[1]]
    with poison(backbone, cases["poisoned"]):
        sick = train(backbone, parallel, list(cases.values()), 3)
        spoiled = cases["poisoned"].initial
    assert spoiled is not None
    (failed,) = sick.results["poisoned"]
    assert failed.status == "failed" and "step 1" in failed.reason
    for key_of, value in sick.tensors["poisoned"].items():
        assert torch.equal(value.nan_to_num(7.0), spoiled[key_of].nan_to_num(7.0)), (
            f"the poisoned task stepped: {key_of}"
        )
    for name in victims:
        assert sick.losses(name)[:1] == healthy.losses(name), name
        assert_same(sick.after_first[name], healthy.tensors[name], name)
        tolerance = 1e-9 if backbone.dtype == torch.float64 else 1e-4
        assert_close(sick.tensors[name], without.tensors[name], tolerance, name)


@pytest.mark.quickstart
@pytest.mark.skipif(not (SMOLLM2 / "config.json").exists(), reason="make prepare has not been run")
def test_gradients_together_are_those_alone_on_a_real_backbone(parallel: Parallel) -> None:
    """Thirty layers in fp32: sums over more rows round differently, and nothing else may differ."""
    backbone = Backbone.load(SMOLLM2, parallel, torch.float32)
    # At this rate the step, not the value it is taken from, decides what the sum is rounded to.
    training = {**PLAIN_SGD, "learning_rate": 1e6}
    cases = make_cases(SMOLLM2, kinds(FAMILIES["llama"]), training, torch.float32, lengths=(8, 40))
    together = moved(backbone, parallel, list(cases.values()))
    for name in ("lora-everywhere", "bottleneck", "prefix"):
        assert_close(together[name], moved(backbone, parallel, [cases[name]])[name], 5e-5, name)


def test_coming_and_going_changes_nothing_for_those_who_stay(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    backbone = backbone_of("llama", torch.float64)
    cases = make_cases(path_of("llama"), kinds(FAMILIES["llama"]), ADAMW)
    leaving, joining = ("lora-everywhere", "prefix"), ("ia3", "bottleneck")
    engine = Engine(backbone, parallel)
    engine.register_tasks([case.task for name, case in cases.items() if name not in joining])
    for step in range(6):
        if step == 2:
            engine.register_tasks([cases[name].task for name in joining])
        if step == 4:
            for name in leaving:
                engine.remove_task(name)
        assert set(engine.step()) == set(engine.tasks)
    stayed = {name: adapter(engine, name) for name in engine.tasks}
    for name in stayed:
        engine.remove_task(name)
    assert engine.step() == {}
    for name, tensors in stayed.items():
        alone = train(backbone, parallel, [cases[name]], 4 if name in joining else 6)
        assert_close(tensors, alone.tensors[name], 1e-9, name)


def test_the_backbone_is_left_as_it_was(backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel) -> None:
    backbone = backbone_of("llama", torch.float32)
    cases = make_cases(path_of("llama"), kinds(FAMILIES["llama"]), ADAMW, torch.float32)
    pairs = cases["lora"].records.pairs[:3]
    weights = {name: value.clone() for name, value in backbone.model.named_parameters()}
    attributes = {name: set(vars(module)) for name, module in backbone.model.named_modules()}
    engine = Engine(backbone, parallel)
    logits = engine_logits(engine, cases["lora"], pairs)
    train(backbone, parallel, list(cases.values()), 2)
    assert_same(dict(backbone.model.named_parameters()), weights, "weights")
    assert all(value.grad is None for value in backbone.model.parameters())
    assert {name: set(vars(module)) for name, module in backbone.model.named_modules()} == attributes
    for found, wanted in zip(engine_logits(engine, cases["lora"], pairs), logits, strict=True):
        assert torch.equal(found, wanted)
