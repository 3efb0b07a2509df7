"""The optimizer steps of a bucket whose tasks have optimizers of both kinds: fused ones, and others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, StepResult
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.engine.updates import BucketUpdate, LoopUpdate, MixedUpdate
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.end_to_end.families import FAMILIES, lora
from tests.end_to_end.harness import Case, adapter, random_records

# In turns, so that a task's row among its kind is not the one among all; the third is NaN.
OPTIMIZERS = ("lion_32bit", "adamw_torch", "sgd", "adafactor", "adamw_torch_fused")
STEPS = 3


def mixed(optimizers: Sequence[TaskOptimizer]) -> BucketUpdate:
    return MixedUpdate(optimizers, LoopUpdate)


def test_tasks_of_both_kinds_step_as_one_after_the_other(tmp_path: Path) -> None:
    parallel = initialize(device="cpu")
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama"), parallel)
    found = []
    for make in (LoopUpdate, mixed):
        engine = Engine(backbone, parallel, make_update=make)
        cases = []
        for seed, name in enumerate(OPTIMIZERS):
            training = {"optim": name, "learning_rate": 1e-2, "max_steps": STEPS}
            records = random_records(4, 96, 4, 8, seed=seed)
            cases.append(Case(name, lora(FAMILIES["llama"].query_value, r=2), training, records))
        engine.register_tasks([case.task for case in cases])
        engine.optimizer("sgd").flat_params.values.fill_(torch.nan)
        results: list[dict[str, StepResult]] = [engine.step() for _ in range(STEPS)]
        adapters = {name: adapter(engine, name) for name in OPTIMIZERS}
        found.append((results, adapters))
        for name in OPTIMIZERS:
            engine.remove_task(name)
        engine.close()
    (one_by_one, wanted), (together, ours) = found
    assert together[0]["sgd"].diverged and "sgd" not in together[-1]
    for step, other in zip(one_by_one, together, strict=True):
        assert repr(step) == repr(other)  # NaN is no number that equals itself
    for name, tensors in wanted.items():
        for key, tensor in tensors.items():
            assert torch.allclose(ours[name][key], tensor, rtol=0, atol=0, equal_nan=True), f"{name} {key}"
