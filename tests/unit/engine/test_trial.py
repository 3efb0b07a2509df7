"""A plan is tried before its first step: nothing changes by it, and steady steps do not repeat it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine, Planning, trial
from megatron_mux.engine.trial import Trials, fullest_moments
from megatron_mux.pipeline.action import Action, ChunkId
from megatron_mux.pipeline.template import gpipe, one_f_one_b, plain
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.budget import Budget
from tests.end_to_end.families import FAMILIES, diff_pruning, lora
from tests.end_to_end.harness import Case, assert_same, random_records

STEPS = 4
EngineOf = Callable[..., Engine]


def cases_of(longest: int = 12) -> list[Case]:
    targets = FAMILIES["llama"]
    adapters: dict[str, dict[str, Any]] = {
        "lora": lora(targets.query_value, r=4, lora_dropout=0.2),
        "pruned": diff_pruning(targets.query_value),
        "scales": {
            "peft_type": "IA3",
            "target_modules": ["k_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        },
        "bottle": {"peft_type": "BOTTLENECK", "bottleneck_size": 6, "target_modules": ["o_proj"]},
        "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5},
    }
    training = {"per_device_train_batch_size": 3, "max_steps": STEPS, "learning_rate": 1e-2}
    return [
        Case(name, adapter, training, random_records(6, 96, 4, longest, seed=i))
        for i, (name, adapter) in enumerate(adapters.items())
    ]


@pytest.fixture
def engine_of(tmp_path: Path) -> EngineOf:
    def make(planning: Planning, tries_plans: bool = True, residence: Kind = "resident") -> Engine:
        parallel = initialize(device="cpu")
        backbone = Backbone.load(
            tiny_models.make(tmp_path, "llama"), parallel, torch.float64, residence=residence
        )
        return Engine(backbone, parallel, planning, tries_plans=tries_plans)

    return make


def state_of(engine: Engine) -> list[tuple[str, Tensor | None]]:
    """Whatever a step could change, copied."""
    found: list[tuple[str, Tensor | None]] = [
        ("torch's generator", torch.get_rng_state()),
        ("Python's generator", torch.tensor(hash(random.getstate()))),
    ]
    for name in engine.tasks:
        optimizer, adapter = engine.optimizer(name), engine.adapters.tasks[name]
        found.append((f"{name}: step", torch.tensor(engine.progress(name)[0])))
        found += [(f"{name}: {key}", value.clone()) for key, value in adapter.state().items()]
        flats = {"values": adapter.flat_params.values, "gradients": adapter.flat_params.gradients}
        flats |= {f"state {i}": tensor for i, tensor in enumerate(optimizer.tensors)}
        found += [(f"{name}: {what}", flat.clone()) for what, flat in flats.items()]
    for key, weight in engine.backbone.model.named_parameters():
        if weight.untyped_storage().nbytes():
            found.append((key, weight.clone()))
    return found


@contextmanager
def trials() -> Iterator[list[Trials]]:
    """The trials that run meanwhile."""
    run, found = Trials.run, []

    def counted(self: Trials, *given: Any) -> None:
        found.append(self)
        run(self, *given)

    with mock.patch.object(Trials, "run", counted):
        yield found


@pytest.mark.parametrize(
    ("policy", "chunk", "residence"),
    [
        ("spatial", 5, "offloaded"),
        ("temporal", None, "resident"),
    ],
)
def test_nothing_changes_by_a_trial(
    policy: Any, chunk: int | None, residence: Kind, engine_of: EngineOf
) -> None:
    failures, tried = Trials.failures, 0

    def watched(self: Trials, *given: Any) -> dict[int, str]:
        nonlocal tried
        before = state_of(engine)
        with trials() as found:
            reasons = failures(self, *given)
        tried += len(found)
        after = state_of(engine)
        assert [key for key, _ in after] == [key for key, _ in before]
        for (key, value), (_, wanted) in zip(after, before, strict=True):
            same = value is wanted if value is None or wanted is None else torch.equal(value, wanted)
            assert same, key
        return reasons

    engine = engine_of(Planning(policy, 1, micro_batches=2, chunk=chunk), residence=residence)
    engine.register_tasks([case.task for case in cases_of()])
    with mock.patch.object(Trials, "failures", watched):
        while engine.active:
            engine.steps(2)
    assert tried
    untried = engine_of(Planning(policy, 1, micro_batches=2, chunk=chunk), False, residence)
    untried.register_tasks([case.task for case in cases_of()])
    while untried.active:
        untried.steps(2)
    for name in untried.tasks:
        assert_same(engine.adapter_tensors(name) or {}, untried.adapter_tensors(name) or {}, name)


def test_steady_steps_are_not_tried_again(engine_of: EngineOf) -> None:
    engine = engine_of(Planning("spatial", 1))
    first, *more = cases_of()
    first.records.pairs = first.records.pairs[:3] * 2  # every step is as large as the first
    with trials() as found:
        engine.register_tasks([first.task])
        for _ in range(STEPS - 1):
            engine.step()
        assert len(found) == 1
        engine.register_tasks([more[0].task])
        engine.step()
        assert len(found) == 2, "the plan is another one"


@pytest.mark.parametrize(
    ("held", "meets", "tried"),
    [(100, False, [1, 1, 1, 1]), (899, False, [1, 2, 2, 2]), (100, True, [1, 2, 2, 2])],
)
def test_longer_records_are_not_tried_where_there_is_room_and_a_pass_recovers(
    held: int, meets: bool, tried: list[int], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps have up to three times the rows of the first: nine times its memory, of 1000 bytes."""
    monkeypatch.setattr(trial, "ranks_meet", lambda stages, parallel: meets)
    engine = engine_of(Planning("spatial", 1))
    case = cases_of()[0]
    case.records.pairs = sorted(case.records.pairs, key=lambda pair: len(pair[0]))
    counts = []
    with (
        trials() as found,
        mock.patch.object(runtime, "held_and_allowed_memory", lambda device: (held, 1000)),
    ):
        engine.register_tasks([case.task])
        while engine.active:
            engine.step()
            counts.append(len(found))
    assert counts == tried


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_the_fullest_moments_are_the_template_s(schedule: Any) -> None:
    def of(chunk_id: ChunkId) -> int:
        return {0: 10, 1: 7}[chunk_id.bucket]

    for rank, actions in enumerate(schedule(3, plain([4, 4]))):
        (first, second), size = fullest_moments(actions, of, of, 2)
        if schedule is gpipe:
            assert (len(first), len(second)) == (4, 8)
            assert size == (4 * 10 + 10, 4 * 10 + 4 * 7 + 7)
        else:
            count = 3 - rank  # in flight
            assert first == [Action(rank, "F", 0, i) for i in range(count)]
            assert second[-1] == Action(rank, "F", 1, 0) and len(second) == count
            assert size == (10 * (count + 1), 10 * (count - 1) + 2 * 7)


@pytest.mark.parametrize(("policy", "share"), [("temporal", 0.85), ("spatial", 0.6)])
def test_within_a_budget_no_step_runs_out_of_memory(policy: Any, share: float, engine_of: EngineOf) -> None:
    """What the trial passes, the step does, too: all failures are the trials'."""

    def trained(limit: float | None) -> tuple[Engine, Budget]:
        engine = engine_of(Planning(policy, 1))
        with Budget() as budget:
            engine.register_tasks([case.task for case in cases_of(24)])
            budget.limit = limit
            while engine.active:
                assert engine.step()
        return engine, budget

    _, unlimited = trained(None)
    engine, budget = trained(share * unlimited.peak)
    assert budget.failures and engine.planning.log_lines
    assert all("the step runs" in said for said in engine.planning.log_lines), engine.planning.log_lines
    assert all(engine.progress(name) == (STEPS, STEPS, "finished") for name in engine.tasks)
