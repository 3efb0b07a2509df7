"""The sizes at which tables are rehearsed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.worst_case_batch import STEPS
from megatron_mux.estimate.rehearsal import rehearsal
from megatron_mux.footprint.content import ATTENTION, COUNTS
from megatron_mux.footprint.signature import Signature
from megatron_mux.kernels.attention.short import LONGEST
from megatron_mux.tasks import TaskSpec
from tests.unit.estimate.played import CHUNK, base, played, signature


def test_every_group_has_a_bucket_with_tasks_of_its_own() -> None:
    made = rehearsal(base(), [signature(), signature(use_dora=True)], [(0,), (0, 1)], 3, CHUNK)
    buckets = made.run.plan.buckets
    assert [bucket.tasks for bucket in buckets] == [("0-0",), ("1-0",), ("2-0", "2-1")]
    assert [bool(bucket.chunk) for bucket in buckets] == [True, False, False]
    assert read_info(made.run.config).shape.layers == 3
    assert made.run.steps > made.warm


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


def test_where_no_chunks_are_asked_for_no_bucket_is_spent_on_them() -> None:
    signatures = [signature(), signature(use_dora=True)]
    made = rehearsal(base(), signatures, [(0,), (0, 1)], 3, CHUNK, chunks=False)
    buckets = made.run.plan.buckets
    assert [bucket.tasks for bucket in buckets] == [("0-0",), ("1-0", "1-1")]
    assert not any(bucket.chunk for bucket in buckets) and made.cut == 0


def test_what_lasts_is_told_by_one_size() -> None:
    sized, one = (
        rehearsal(base(), [signature()], [(0,)], 2, CHUNK, sized=several).run for several in (True, False)
    )
    assert one.steps == STEPS < sized.steps


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


def test_on_a_cpu_short_records_of_a_batch_have_one_length() -> None:
    """Else which of attention's products is which could not be told; records of any length only where asked for."""
    on_cpu = replace(base(), device="cpu")
    for short, kinds in ((True, {"short"}), (False, {"differ"})):
        run = rehearsal(on_cpu, [signature(), signature(use_dora=True)], [(0,), (0, 1)], 3, CHUNK, short).run
        tasks = {one.name: one for one in run.tasks}
        for bucket in run.plan.buckets:
            every = [list(batched(tasks[name].lengths)) for name in bucket.tasks]
            found = set()
            for together in zip(*every, strict=True):
                distinct = {tokens for own in together for tokens in own}
                found.add("differ" if len(distinct) > 1 else "short" if max(distinct) <= LONGEST else "long")
            assert found == kinds


def batched(lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    """The records of each full batch: three."""
    return (lengths[i : i + 3] for i in range(0, len(lengths) - 2, 3))
