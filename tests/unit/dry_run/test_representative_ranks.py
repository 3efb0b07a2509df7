"""Among the ranks that are chosen is the one that needs most memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_mux.dry_run.representative_ranks import representative_ranks
from megatron_mux.dry_run.run_spec import RunSpec, TaskRecords
from megatron_mux.expert_shape import Placement
from megatron_mux.fusion.plan import plan_for
from tests.unit.memory.traced import LLAMA

LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
BOTTLENECK = {"peft_type": "BOTTLENECK", "bottleneck_size": 64, "target_modules": ["down_proj"]}


def _task(name: str, lengths: list[int], labels: list[int], adapter: dict[str, Any] = LORA) -> TaskRecords:
    task = {
        "name": name,
        "adapter": adapter,
        "data": {"path": "none", "max_length": 64},
        "training": {"per_device_train_batch_size": len(lengths)},
    }
    return TaskRecords(task, lengths, labels)


def _run(tasks: list[TaskRecords], data: int = 1, stages: int = 1, **more: Any) -> RunSpec:
    plan = replace(plan_for("spatial", {one.name: 1 for one in tasks}, stages), data=data)
    config = {**LLAMA, "num_hidden_layers": 4, "vocab_size": more.pop("vocabulary", 512)}
    return RunSpec(config, tasks, plan, **more)


@pytest.mark.parametrize("tensor", [1, 2])
def test_most_tokens_tell_first_and_most_labels_last(tensor: int) -> None:
    # The longest sequence goes to the first pipeline, the other one to the second: it is labelled throughout.
    run = _run([_task("a", [38, 40], [38, 2])], 2, 2, tensor=tensor, vocabulary=30_000)
    assert representative_ranks(run) == [0, 2 * tensor, 2 * tensor + tensor]
    assert representative_ranks(replace(run, tasks=[_task("a", [38, 40], [2, 40])])) == [0, 2 * tensor]


def test_both_of_a_pair_are_on_one_rank() -> None:
    """Of three pairs the longest is alone on the first; sequences by themselves would be divided evenly."""
    own = _task("a", [40, 20, 20, 20, 20, 20], [8, 8, 8, 8, 8, 8])
    pairs = {**own.task, "training": {"loss": "dpo", "per_device_train_batch_size": 3}}
    assert representative_ranks(_run([replace(own, task=pairs)], 2)) == [1]


def test_of_tensor_ranks_that_divide_rows_one_with_most_of_each_kind() -> None:
    tasks = [_task("a", [32, 32], [8, 8]), _task("b", [32, 32], [8, 8], BOTTLENECK)]
    assert representative_ranks(_run(tasks, tensor=2, sequence_parallel=True)) == [0, 1]
    assert representative_ranks(_run(tasks, tensor=2)) == [0]
    assert representative_ranks(_run(tasks[:1], tensor=2, sequence_parallel=True)) == [0]
    many = [_task("a", [32, 32], [8, 8]), _task("b", [8, 8], [4, 4], BOTTLENECK)]
    assert representative_ranks(_run(many, tensor=4, sequence_parallel=True)) == [0, 3]


def test_of_tensor_ranks_that_divide_heads_of_keys_one_with_most_of_each_adapted_module() -> None:
    """Four ranks share two groups: two heads of queries, one of keys, one of values. Even ranks have queries only."""
    values = {**LORA, "target_modules": ["v_proj"]}
    assert representative_ranks(_run([_task("a", [32], [8])], tensor=4)) == [0]
    assert representative_ranks(_run([_task("a", [32], [8], values)], tensor=4)) == [1]
    assert representative_ranks(_run([_task("a", [32], [8]), _task("b", [32], [8], values)], tensor=4)) == [
        0,
        1,
    ]


@pytest.mark.parametrize("placed", [True, False])
def test_experts_are_held_and_selected_by_some_ranks_more_than_by_others(placed: bool) -> None:
    run = _run([_task("a", [8] * 4, [4] * 4)], data=4, expert=4)
    config = {**run.config, **MIXTRAL}
    assert representative_ranks(replace(run, config=config)) == [0]
    where = ((1,), (1,), (1,), (0,), (2,), (2,), (3,), (3,))
    placement = Placement(4, dict.fromkeys(range(4), where)) if placed else None
    access = dict.fromkeys(range(4), (0.1,) * 7 + (1.3,))
    # The first pipeline has most tokens, or as many: of four ranks it is the one that neither holds nor gets most.
    assert representative_ranks(replace(run, config=config, placement=placement)) == ([1] if placed else [0])
    chosen = representative_ranks(replace(run, config=config, placement=placement, access=access))
    assert chosen == ([1, 3] if placed else [3])


def test_stages_that_are_asked_for_are_among_them() -> None:
    run = _run([_task("a", [8] * 4, [4] * 4)], stages=4)
    assert representative_ranks(run) == [0, 3]
    assert representative_ranks(run, [2, 7, -1]) == [0, 2, 3]


def test_a_rank_has_every_so_many_th_of_its_stages() -> None:
    one = _run([_task("a", [8, 9], [4, 4])], data=2, stages=2)
    several = replace(one, plan=replace(one.plan, stages=4, virtual=2))
    assert representative_ranks(several) == [0, 2]
    assert representative_ranks(replace(several, tasks=[_task("a", [9, 8], [4, 4])])) == [0, 2]


def test_whoever_has_most_rows_of_a_kind_is_chosen_with_whoever_has_most() -> None:
    inputs = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    wide = {"peft_type": "IA3", "target_modules": inputs, "feedforward_modules": inputs}
    # Two sequences to a pipeline: the first has that of `a`, and most tokens; the other has two of `b`.
    tasks = [_task("a", [21], [4]), _task("b", [20, 19, 19], [4] * 3, wide)]
    assert representative_ranks(_run(tasks, data=2)) == [0, 1]
    # As many of `b` on both: whoever has most tokens has most of all.
    assert representative_ranks(_run([tasks[0], _task("b", [22, 22], [4, 4], wide)], data=2)) == [0]
