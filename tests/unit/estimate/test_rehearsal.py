"""The sizes at which tables are rehearsed."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from megatron_mux.dry_run.depth import read_info
from megatron_mux.estimate.rehearsal import rehearsal
from megatron_mux.footprint.content import ATTENTION, COUNTS
from megatron_mux.footprint.signature import Signature
from megatron_mux.tasks import TaskSpec
from tests.unit.estimate.played import CHUNK, base, played, signature


def test_every_group_has_a_bucket_with_tasks_of_its_own() -> None:
    made = rehearsal(base(), [signature(), signature(use_dora=True)], [(0,), (0, 1)], 3, CHUNK)
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
        rehearsal(base(), [one], [(0,)], 3, CHUNK) for one in (signature(), Signature.of(spec.plain()))
    )
    assert made.warm == spec.adapter.freezes_after(made.run.steps) and made.warm > plain.warm
    assert made.run.steps - made.warm == plain.run.steps - plain.warm


@pytest.mark.parametrize("group", [(0,), (0, 1)])
def test_sizes_tell_rows_labels_and_sequences_apart(group: tuple[int, ...]) -> None:
    windows = played([group], 3, int)
    contents = windows.contents(windows.of("F", 1))
    features = contents.features(CHUNK)
    unused = [COUNTS.index(name) for name in ("copied", *ATTENTION)]
    told = np.delete(features, unused, axis=1)
    told /= told.max(axis=0)
    for three in combinations(range(told.shape[1]), 3):  # what goes by two features is not taken for another
        assert np.linalg.matrix_rank(told[:, three]) == 3 < len(told), three
    assert set(contents.sequences) == {3.0 * len(group), 1.0 * len(group)}
    full = contents.labels.sum(axis=1) > CHUNK
    assert full.any() and not full.all()
