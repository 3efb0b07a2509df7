"""However the backbone is split, preference tasks beside a supervised one come out the same: fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import load_stages
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine, Planning, StepResult
from megatron_mux.runtime import Parallel
from tests.distributed.conftest import assert_no_problems
from tests.end_to_end.families import FAMILIES, lora
from tests.end_to_end.harness import Case, assert_close, random_records
from tests.end_to_end.preference_tasks import LORA, Preferences, furnished
from tests.end_to_end.workplace import Workplace
from tests.reference import solo

STEPS = 3


class Layout(NamedTuple):
    """How four processes are divided: the rest is data parallel."""

    tensor: int
    pipeline: int
    sequence_parallel: bool = False
    micro_batches: int | None = None
    chunk: int | None = None
    residence: Kind = "resident"


LAYOUTS = [
    Layout(1, 4, chunk=4),
    Layout(2, 2, True, micro_batches=3),
    Layout(1, 2, residence="sharded"),
]
Outcome = tuple[list[dict[str, StepResult]], dict[str, dict[str, Tensor] | None], dict[str, float]]


def trained(joined: Callable[..., Parallel], root: Path, layout: Layout) -> Outcome:
    parallel = joined(layout.tensor, layout.pipeline, layout.sequence_parallel)
    place = Workplace(root)
    stages = load_stages(place.backbone, parallel, torch.float64, residence=layout.residence)
    planning = Planning("spatial", layout.pipeline, micro_batches=layout.micro_batches, chunk=layout.chunk)
    engine = Engine(stages, parallel, planning)
    preferences = Preferences(place)
    start = {key: value.double() for key, value in solo.random_adapter(place.backbone, LORA, seed=1).items()}
    tasks = [
        preferences.task("dpo", "dpo", 8),
        preferences.task("cached", "dpo", 8, start, precompute_ref_log_probs=True),
        preferences.task("orpo", "orpo", 8, start, gradient_accumulation_steps=2),
        preferences.task("kto", "kto", 8, start),
    ]
    training = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 8, "seed": 3}
    adapter = lora(FAMILIES["llama"].query_value, r=3)
    tasks.append(Case("sft", adapter, training, random_records(9, 90, 3, 16, seed=4)).task)
    engine.register_tasks(tasks)
    results = [engine.step(), *engine.steps(1), *engine.steps(STEPS - 2)]
    evaluated = engine.evaluate("kto")
    assert evaluated is not None
    tensors = {name: engine.adapter_tensors(name) for name in engine.tasks}
    return results, tensors, dict(evaluated.values)


@pytest.fixture(scope="module")
def root(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("preferences", furnished)


@pytest.fixture(scope="module")
def flat(joined: Callable[..., Parallel], root: Path) -> Outcome:
    """Four data-parallel ranks, each with some pairs of every batch."""
    return trained(joined, root, Layout(1, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_preferences(
    layout: Layout, joined: Callable[..., Parallel], root: Path, flat: Outcome
) -> None:
    found, problems = trained(joined, root, layout), []
    for step, (results, wanted) in enumerate(zip(found[0], flat[0], strict=True)):
        for name, expected in wanted.items():
            result = results[name]
            if result.loss != pytest.approx(expected.loss, rel=1e-9):
                problems.append(f"{name} step {step}: loss {result.loss}, not {expected.loss}")
            if dict(result.metrics) != pytest.approx(dict(expected.metrics), rel=1e-7, abs=1e-9):
                problems.append(f"{name} step {step}: {result.metrics}, not {expected.metrics}")
    if found[2] != pytest.approx(flat[2], rel=1e-7, abs=1e-9):
        problems.append(f"evaluation: {found[2]}, not {flat[2]}")
    for name, tensors in flat[1].items() if dist.get_rank() == 0 else ():
        try:
            assert_close(found[1][name] or {}, tensors or {}, 1e-9, name)
        except AssertionError as error:
            problems.append(str(error))
    assert_no_problems(problems)
