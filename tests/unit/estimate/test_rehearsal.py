"""The sizes at which tables are rehearsed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from megatron_mux.estimate.rehearsal import rehearsal
from megatron_mux.footprint.content import ATTENTION, COUNTS
from megatron_mux.footprint.signature import Signature
from megatron_mux.tasks import TaskSpec
from tests.unit.estimate.played import CHUNK, base, played, signature


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_attention_has_two_calls_where_one_kernel_cannot_serve_all_lengths(pipelines: int, loss: str) -> None:
    """Of nearly all rows and of a few, on every pipeline: in fp32."""
    run = replace(base(), dtype="float32", plan=replace(base().plan, data=pipelines))
    lora = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    training = {"max_steps": 3, "loss": loss}
    spec = TaskSpec.model_validate(
        {"name": "a", "adapter": lora, "data": {"path": "none"}, "training": training}
    )
    made = rehearsal(run, [Signature.of(spec.plain())], [(0,)], 3, CHUNK).run
    (_, task) = made.tasks
    together = 2 if loss == "dpo" else 1
    batch = 3 * pipelines * together
    for start in range(0, len(task.lengths), batch):
        own = task.lengths[start : start + batch]
        (long,) = {length for length in own if length > 9}
        assert sorted(own) == [9] * pipelines + [long] * (len(own) - pipelines) and long % 8 == 0


def test_a_mask_is_frozen_by_the_last_step() -> None:
    pruned = {"peft_type": "DIFF_PRUNING", "target_modules": ["q_proj"]}
    spec = TaskSpec.model_validate(
        {"name": "a", "adapter": pruned, "data": {"path": "none"}, "training": {"max_steps": 3}}
    )
    plain, made = (
        rehearsal(base(), [one], [(0,)], 3, CHUNK) for one in (signature(), Signature.of(spec.plain()))
    )
    assert (made.warm, made.run.steps) == (plain.warm, plain.run.steps)
    for one in made.run.tasks:
        total = TaskSpec.model_validate(one.task).training.max_steps
        assert total is not None and spec.adapter.freezes_after(total) == made.run.steps


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


def test_labels_do_not_follow_from_rows_and_sequences_where_none_fill_a_chunk() -> None:
    """A small vocabulary has large chunks of logits."""
    (_, task) = rehearsal(base(), [signature()], [(0,)], 3, 1 << 22).run.tasks
    of_batches = [
        [[sum(own), len(own)] for own in (values[i : i + 3] for i in range(0, len(values), 3))]
        for values in (task.lengths, task.labels)
    ]
    told = np.array([[rows, labels, count] for (rows, count), (labels, _) in zip(*of_batches, strict=True)])
    assert np.linalg.matrix_rank(told / told.max(axis=0)) == 3
