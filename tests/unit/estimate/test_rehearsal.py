"""What of a task decides bytes, and the sizes at which they are run."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from megatron_mux.dry_run.depth import read_info
from megatron_mux.estimate.rehearsal import rehearsal, signature_of
from megatron_mux.footprint.content import COUNTS
from megatron_mux.tasks import TaskSpec
from tests.unit.estimate.played import CHUNK, base, played, signature

SAME: dict[str, Any] = {
    "per_device_train_batch_size": 7,
    "learning_rate": 0.5,
    "seed": 3,
    "max_steps": 9,
    "warmup_steps": 2,
}


def task(adapter: dict[str, Any], training: dict[str, Any]) -> TaskSpec:
    """A LoRA task."""
    section = {"peft_type": "LORA", "target_modules": ["q_proj"], **adapter}
    return TaskSpec.model_validate(
        {"name": "a", "adapter": section, "data": {"path": "none"}, "training": {"max_steps": 3, **training}}
    )


def test_batches_and_rates_do_not_make_a_signature() -> None:
    plain = signature_of(task({}, {}).plain())
    assert signature_of(task({}, SAME).plain()) == plain
    others: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"r": 32}, {}),
        ({"lora_dropout": 0.1}, {}),
        ({}, {"optim": "sgd"}),
        ({}, {"loss": "dpo"}),
    )
    for adapter, training in others:
        assert signature_of(task(adapter, training).plain()) != plain


def test_every_group_has_a_bucket_with_tasks_of_its_own() -> None:
    made = rehearsal(base(), [signature(), signature(r=8)], [(0,), (0, 1)], 3, CHUNK)
    buckets = made.run.plan.buckets
    assert [bucket.tasks for bucket in buckets] == [("0-0",), ("1-0",), ("2-0", "2-1")]
    assert [bool(bucket.chunk) for bucket in buckets] == [True, False, False]
    assert read_info(made.run.config).shape.layers == 3
    assert made.run.steps > made.warm


def test_a_mask_is_frozen_before_the_steps_that_count() -> None:
    pruned = {"peft_type": "DIFF_PRUNING", "target_modules": ["q_proj"]}
    spec = TaskSpec.model_validate(
        {"name": "a", "adapter": pruned, "data": {"path": "none"}, "training": {"max_steps": 3}}
    )
    plain, made = (
        rehearsal(base(), [one], [(0,)], 3, CHUNK) for one in (signature(), signature_of(spec.plain()))
    )
    assert made.warm == spec.adapter.freezes_after(made.run.steps) and made.warm > plain.warm
    assert made.run.steps - made.warm == plain.run.steps - plain.warm


@pytest.mark.parametrize("group", [(0,), (0, 1)])
def test_sizes_tell_rows_labels_and_sequences_apart(group: tuple[int, ...]) -> None:
    windows = played([group], 3, int)
    contents = windows.contents(windows.of("F", 1))
    features = contents.features(CHUNK)
    unused = [COUNTS.index(name) for name in ("squares", "copied")]
    told = np.delete(features, unused, axis=1)
    told /= told.max(axis=0)
    for three in combinations(range(told.shape[1]), 3):  # what goes by two features is not taken for another
        assert np.linalg.matrix_rank(told[:, three]) == 3 < len(told), three
    assert set(contents.sequences) == {3.0 * len(group), 1.0 * len(group)}
    full = contents.labels.sum(axis=1) > CHUNK
    assert full.any() and not full.all()
