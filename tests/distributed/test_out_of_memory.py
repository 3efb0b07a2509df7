"""One rank of a pipeline runs out of memory: every rank repeats that bucket's step in smaller parts, and only that."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_mux.backbone.model import load_stages
from megatron_mux.backbone.split import Split
from megatron_mux.engine import Engine, Planning
from megatron_mux.engine.bucket_finalizer import BucketFinalizer
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.budget import failing
from tests.distributed.conftest import assert_no_problems
from tests.end_to_end.harness import Case, assert_close, random_records

STEPS = 4
Found = tuple[dict[str, list[tuple[int, float]]], dict[str, Any], list[str]]


def cases_of() -> list[Case]:
    training = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "max_steps": STEPS}
    adapter = {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    return [
        Case(name, adapter, training, random_records(20, 96, 4, 12, seed=i)) for i, name in enumerate("abc")
    ]


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("models", lambda directory: tiny_models.make(directory, "llama")) / "llama"


def trained(
    joined: Callable[..., Parallel], path: Path, pipeline: int, split: Split, policy: Any, short: str = ""
) -> Found:
    """Every task to its end; `short`: what runs out of memory, `passes` or the `ends` of buckets' steps."""
    parallel = joined(1, pipeline, False)
    stages = load_stages(path, parallel, torch.float64, split=split or None)
    virtual = len(stages)
    engine = Engine(stages, parallel, Planning(policy, pipeline * virtual, virtual=virtual, split=split))
    engine.register_tasks([case.task for case in cases_of()])
    results: dict[str, list[tuple[int, float]]] = {name: [] for name in engine.tasks}
    # Twice, on the last rank alone; where tasks do not share a batch, for one of them alone.
    left = 2 * (bool(short) and dist.get_rank() == dist.get_world_size() - 1)

    def hit(tasks: Collection[str]) -> bool:
        nonlocal left
        lacks = left > 0 and "b" in tasks
        left -= lacks
        return lacks

    def before_sums(self: BucketFinalizer, bucket: int) -> None:
        if short == "ends" and hit(self.burst.bucket(bucket).tasks):
            raise torch.OutOfMemoryError("made to fail. Nothing is short")
        original(self, bucket)

    original = BucketFinalizer._before_sums
    passes = failing(stages, lambda batch: short == "passes" and hit(batch.task_rows))
    with passes, mock.patch.object(BucketFinalizer, "_before_sums", before_sums):
        turns = 0
        while engine.active and turns < 40:
            turns += 1
            for step in engine.steps(2):
                for name, result in step.items():
                    results[name].append((result.step, result.loss))
    return (
        results,
        {name: engine.adapter_tensors(name) or {} for name in engine.tasks},
        engine.planning.log_lines,
    )


@pytest.fixture(scope="module")
def undisturbed(path: Path, joined: Callable[..., Parallel]) -> Found:
    """A run in which nothing runs out of memory: adapters come out the same however the backbone is divided."""
    return trained(joined, path, 1, (), "spatial")


# Each division with both policies and both ways to run out; each policy with each way on two divisions.
DIVISIONS: dict[str, tuple[int, Split]] = {
    "DP4": (1, ()),
    "PP2": (2, ()),
    "virtual": (2, (1, 1, 1, 1)),
    "PP4": (4, ()),
}
ALIKE = (("temporal", "passes"), ("spatial", "ends"))
CROSSED = (("temporal", "ends"), ("spatial", "passes"))


@pytest.mark.parametrize(
    ("pipeline", "split", "policy", "short"),
    [
        (*DIVISIONS[name], *pair)
        for name, pairs in (("DP4", CROSSED), ("PP2", ALIKE), ("virtual", CROSSED), ("PP4", ALIKE))
        for pair in pairs
    ],
)
def test_one_rank_out_of_memory_costs_nobody_a_step(
    pipeline: int,
    split: Split,
    policy: str,
    short: str,
    path: Path,
    joined: Callable[..., Parallel],
    undisturbed: Found,
) -> None:
    wanted, adapters, _ = undisturbed
    found, tensors, log_lines = trained(joined, path, pipeline, split, policy, short)
    problems = []
    if not any("out of memory (rank 3 at" in said for said in log_lines):
        problems.append(f"nothing was short: {log_lines}")
    for name, steps in wanted.items():
        if [step for step, _ in found[name]] != list(range(1, STEPS + 1)):
            problems.append(f"{name}: steps {found[name]}")
        if [loss for _, loss in found[name]] != pytest.approx([loss for _, loss in steps], rel=1e-9):
            problems.append(f"{name}: losses {found[name]} for {steps}")
        if dist.get_rank() == 0:
            try:
                assert_close(tensors[name], adapters[name], 1e-9, name)
            except AssertionError as error:
                problems.append(str(error))
    assert_no_problems(problems)
