"""Ranks on GPUs that are not there: stages of many layers from few, and what divisions change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_mux.dry_run.depth import deepened, shallow
from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.run_spec import Recording, RunSpec
from megatron_mux.dry_run.worst_case_batch import STEPS_THAT_PRUNE
from megatron_mux.fusion.plan import plan_for
from megatron_mux.memory.stream.events import Category, StreamError
from megatron_mux.memory.worker import WorkerError
from tests.unit.dry_run.recordings import KINDS, begins, held, last_step_peak, task_of
from tests.unit.memory.stream.peak import peak_of
from tests.unit.memory.traced import LLAMA

pytestmark = pytest.mark.usefixtures("warm_workers")

TRAINING = {"per_device_train_batch_size": 2, "max_steps": STEPS_THAT_PRUNE}
ALIKE = ("lora", "scales", "bottle")
"""Kinds that act on each layer by itself: few layers tell. The others take all layers, at any depth."""


def _run(
    layers: int, kinds: tuple[str, ...] = ("lora",), stages: int = 1, data: int = 1, **more: Any
) -> RunSpec:
    tasks = [
        task_of(
            name, KINDS[name], TRAINING, [32, 32], *([[32] * 65, [16] * 65] if more.get("rolling") else [])
        )
        for name in kinds
    ]
    plan = replace(plan_for("temporal", dict.fromkeys(kinds, 1), stages), data=data)
    return RunSpec({**LLAMA, "num_hidden_layers": layers}, tasks, plan, **more)


def _one_step(layers: int, kind: str, recompute: str) -> RunSpec:
    return _run(layers, (kind,), recompute=recompute, steps=1)


DEEP = {
    "rolling, two kinds, evaluated": (_run(6, ("lora", "scales"), rolling=True), 0),
    "middle of three stages": (_run(18, stages=3), 1),
    "sequence parallel": (_run(6, tensor=2, sequence_parallel=True), 1),
    "sharded": (_run(7, data=2, residence="sharded"), 1),
    "sharded, last of two stages": (_run(14, ("bottle",), 2, 2, residence="sharded"), 3),
    "offloaded": (_run(7, ("bottle",), residence="offloaded"), 0),
}


def _recordings(asked: dict[str, list[tuple[RunSpec, int]]]) -> dict[str, list[Recording]]:
    made = iter(dry_runs([part for parts in asked.values() for part in parts], whole=True))
    return {name: [next(made) for _ in parts] for name, parts in asked.items()}


def test_every_kind_and_recomputation_at_depths_from_few_layers_event_for_event() -> None:
    depths = (4, 10)
    asked = {}
    for kind, recompute in zip(ALIKE, ("none", "full", "selective"), strict=True):
        deep, few = (_one_step(layers, kind, recompute) for layers in (10, 8))
        assert shallow(few) == shallow(deep)  # the larger of the two has 4 layers
        asked[f"{kind} {recompute}"] = [(one, 0) for one in (*shallow(deep), deep)]
    for name, (two, three, whole) in _recordings(asked).items():
        for layers, same in zip(depths, (three, whole), strict=True):
            kind, recompute = name.split()
            assert deepened(_one_step(layers, kind, recompute), 0, two, three) == same, name
    for kind in set(KINDS) - set(ALIKE):
        assert not any(shallow(_run(layers, (kind,))) for layers in depths)


def _weights(recording: Recording) -> int:
    """Bytes of weights before the first step."""
    return recording.stream.breakdown(begins(recording)[0] - 1)[Category.PARAMETERS]


def test_divided_and_rolling_stages_from_few_layers_event_for_event() -> None:
    asked = {name: [(one, rank) for one in (run, *shallow(run))] for name, (run, rank) in DEEP.items()}
    assert all(len(parts) == 3 for parts in asked.values())
    asked["resident"] = [(_run(7, data=2), 1)]
    found = _recordings(asked)
    for name, (run, rank) in DEEP.items():
        whole, *few = found[name]
        assert deepened(run, rank, *few) == whole, name
    assert _weights(found["sharded"][0]) < 0.6 * _weights(found["resident"][0])
    assert held(found["offloaded"][0]) < 0.2 * held(found["resident"][0])
    whole = found["rolling, two kinds, evaluated"][0]
    assert len(begins(whole)) == 1 and "the evaluation of lora, scales, 0F0.1" in [
        what for _, what in whole.marks
    ]
    assert whole.communicators == 0 and found["sharded"][0].communicators > 0


def test_few_layers_that_do_not_line_up_are_not_trusted() -> None:
    run = _run(6)
    two, three = shallow(run)
    other = replace(three, recompute="full")
    few, more = dry_runs([(two, 0), (other, 0)], whole=True)
    with pytest.raises(StreamError):
        deepened(run, 0, few, more)


def test_pruning_takes_most_where_its_masks_are_fixed_or_kept() -> None:
    found, alone = dry_runs([(_run(2, ("sparse",), steps=3), 0), (_run(2, ("sparse",)), 0)])
    live, steps = found.stream.live(), [*begins(found), len(found.stream)]
    peaks = [max(live[a:b]) for a, b in zip(steps[:-1], steps[1:], strict=True)]
    operators = {event.moment.operator for event in found.stream}
    assert "scratch of a sort" in operators
    assert "scratch of a sort" in {found.stream[i].moment.operator for i in range(steps[1], steps[2])}
    assert live[steps[2] - 1] > live[steps[1] - 1], "the masks stay"
    assert last_step_peak(alone) == max(peaks[1:2])


def test_a_frozen_copy_for_reference_is_held() -> None:
    adapter = {"peft_type": "LORA", "r": 64, "target_modules": "all-linear"}
    runs = []
    for start in ({}, {"adapter_name_or_path": "none"}):
        task = task_of("pairs", adapter | start, {**TRAINING, "loss": "dpo"}, [32] * 8)
        runs.append(RunSpec(LLAMA, [task], plan_for("spatial", {"pairs": 1}, 1)))
    without, with_copy = dry_runs([(run, 0) for run in runs], whole=True)
    more = held(with_copy) - held(without)
    size = without.stream.breakdown(begins(without)[0] - 1)[Category.GRADIENTS]
    assert more == pytest.approx(2.5 * size, rel=0.01), "values and gradients in fp32, a copy in bf16"


def test_layers_that_differ_are_all_dry_run() -> None:
    one = _run(8)
    upper = {**KINDS["lora"], "target_modules": r".*layers\.[4-7]\.self_attn\.q_proj"}
    tasks = [replace(one.tasks[0], task={**one.tasks[0].task, "adapter": upper})]
    assert shallow(one) and not shallow(replace(one, tasks=tasks))
    assert not shallow(replace(one, plan=replace(one.plan, stages=2, virtual=2)))
    assert not shallow(_run(5))


def test_what_cannot_be_divided_is_said() -> None:
    with pytest.raises(WorkerError, match="cannot be divided"):
        dry_runs([(_run(2, tensor=3), 0)])


@pytest.mark.versions
def test_each_stage_of_each_pipeline_can_be_dry_run() -> None:
    run = _run(4, stages=2, data=2, tensor=2)
    first, last = dry_runs([(run, 0), (run, 6)])
    peaks = [peak_of(one.stream).breakdown for one in (first, last)]
    assert all({Category.PARAMETERS, Category.ADAPTERS, Category.OPTIMIZER} <= set(one) for one in peaks)
    # The world, tensor and data ranks, and each way between neighbours.
    assert first.communicators == last.communicators == 1 + 2 + 2
