"""The worst-case batch of a task, by looking at every step with nothing of ours but the sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_mux.adapters.diff_pruning import freeze_step
from megatron_mux.data.sampler import Sampler
from megatron_mux.dry_run import worst_case_batch
from megatron_mux.dry_run.worst_case_batch import (
    Batch,
    densest,
    longest,
    steps_of,
    task_records,
    worst_case,
)
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS


def _spec(peft_type: str = "LORA", **training: Any) -> TaskSpec:
    adapter = {"peft_type": peft_type, "target_modules": ["q_proj"]}
    return TaskSpec.model_validate(
        {
            "name": "a",
            "adapter": adapter,
            "data": {"path": "none", "max_length": 48},
            "training": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, **training},
            "eval": {"path": "none"},
        }
    )


def _data(count: int = 50) -> Any:
    random = np.random.default_rng(0)
    lengths = random.integers(4, 48, count)
    return SimpleNamespace(lengths=lengths, label_counts=random.integers(1, lengths + 1))


def test_the_heaviest_batch_is_that_of_a_step_that_is_taken() -> None:
    data, spec = _data(), _spec(num_train_epochs=2.0)
    sampler = Sampler(50, 6, spec.training.seed)
    steps = [sampler.batch(step) for step in range(18)]
    tokens = [sum(int(data.lengths[i]) for i in own) for own in steps]
    labels = [sum(int(data.label_counts[i]) for i in own) for own in steps]
    found = worst_case(spec, data)
    assert sum(found.lengths) == max(tokens) and len(found.lengths) == 6
    assert sorted(found.lengths) == sorted(int(data.lengths[i]) for i in steps[tokens.index(max(tokens))])
    assert sum(found.labels) >= max(labels)
    assert all(0 < own <= length for own, length in zip(found.labels, found.lengths, strict=True))
    assert sum(worst_case(_spec(max_steps=1), data).lengths) == tokens[0] < max(tokens)


def test_of_too_many_steps_the_longest_records_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worst_case_batch, "_MOST_RECORDS", 10)
    data = _data()
    found = worst_case(_spec(), data)
    assert list(found.lengths) == sorted(data.lengths.tolist())[:-7:-1]
    assert sum(found.labels) == sum(sorted(data.label_counts.tolist())[-6:])


def test_a_few_steps_in_which_all_happens() -> None:
    pruning = _spec("DIFF_PRUNING", num_train_epochs=1.0)
    one = task_records(pruning, longest(pruning), Batch((48, 40), (20, 10)), 2, 3)
    assert one.task["training"]["max_steps"] == worst_case_batch.STEPS_THAT_PRUNE
    assert (
        freeze_step(worst_case_batch.STEPS_THAT_PRUNE) == worst_case_batch.STEPS == 2
    )  # after it there is one more
    assert [steps_of([pruning, _spec()]), steps_of([_spec()])] == [3, 2]
    TaskSpec.model_validate(one.task)
    # Each pipeline has the pass, as often as there are stages, and once more.
    assert [list(one.held_out[rank::3]) for rank in range(3)] == [[48, 40] * 3] * 3
    assert [list(one.held_out_labels[rank::3]) for rank in range(3)] == [[20, 10] * 3] * 3


def test_no_pass_of_an_evaluation_has_more_labels_than_the_densest() -> None:
    data = _data(300)
    found = densest(data)
    assert found.lengths[-1] == max(data.lengths)
    assert sum(found.lengths[:-2]) < TOKENS_PER_PASS <= sum(found.lengths[:-1])
    order = np.random.default_rng(1).permutation(300)
    for begin in range(200):
        tokens = np.cumsum(data.lengths[order[begin:]])
        own = order[begin:][tokens <= TOKENS_PER_PASS]
        assert data.label_counts[own].sum() <= sum(found.labels[:-1])


def test_without_data_all_is_as_long_as_it_may_be() -> None:
    assert longest(_spec()) == Batch((48,) * 6, (48,) * 6)
