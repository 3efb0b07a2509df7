"""Fields of `transformers`' Trainer: tasks trained together with them come out as with `transformers` and `peft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_mux.engine import Engine
from megatron_mux.kernels.dropout import key_of
from megatron_mux.kernels.embedding_noise import EmbeddingNoise
from megatron_mux.runtime import Parallel
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.families import lora
from tests.end_to_end.harness import Case, Trained, assert_close, assert_same, random_records, train
from tests.reference import peft_solo, solo
from tests.reference.loop import Recipe, SoloResult
from tests.reference.loop import train as train_alone

STEPS = 20
LOSS, ADAPTER = 1e-4, 2e-3
NEFTUNE = 5.0

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 2e-3,
    "max_steps": STEPS,
    "lr_scheduler_type": "linear",
}
TASKS: dict[str, dict[str, Any]] = {
    "fused": {"optim": "adamw_torch_fused", "loraplus_lr_ratio": 4.0, "loraplus_weight_decay": 0.05},
    "eight-bit": {"optim": "adamw_8bit", "weight_decay": 0.1, "adam_beta2": 0.98},
    "lion": {
        "optim": "lion_32bit",
        "learning_rate": 2e-4,
        "adam_beta1": 0.95,
        "adam_beta2": 0.98,
        "weight_decay": 0.1,
    },
    "adafactor": {"optim": "adafactor", "weight_decay": 0.05},
    "smoothed": {
        "label_smoothing_factor": 0.2,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 3},
        "warmup_steps": 2,
    },
    "noisy": {
        "neftune_noise_alpha": NEFTUNE,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 6},
        "warmup_steps": 3,
    },
}


def make_case(path: Path, name: str, seed: int) -> Case:
    adapter = lora(["q_proj", "v_proj", "down_proj"], r=64 if name == "eight-bit" else 4)
    training = {**COMMON, **TASKS[name], "seed": seed}
    shortest, longest = (24, 24) if name == "noisy" else (6, 30)  # equal lengths: no padding in the reference
    records = random_records(24, 96, shortest, longest, seed=100 + seed)
    return Case(name, adapter, training, records, solo.random_adapter(path, adapter, seed=seed))


@pytest.fixture(scope="module")
def cases(path_of: PathOf) -> list[Case]:
    """A task for each group of fields."""
    return [make_case(path_of("llama"), name, i) for i, name in enumerate(TASKS)]


@pytest.fixture(scope="module")
def together(backbone_of: BackboneOf, parallel: Parallel, cases: list[Case]) -> Trained:
    """All of them in one engine."""
    return train(backbone_of("llama"), parallel, cases, STEPS)


def alone(path: Path, case: Case) -> SoloResult:
    """What `transformers` and `peft` make of a task; NEFTune's draws are ours, in its own place."""
    if case.name != "noisy":
        return solo.train_solo(path, case.adapter, case.training, case.steps(STEPS), case.initial or {})
    model = peft_solo.wrap(peft_solo.load_model(path), case.adapter, case.initial)
    source = EmbeddingNoise(key_of(case.training["seed"], "neftune"), NEFTUNE, lambda step: [24] * 4)
    step = 0

    def add_noise(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        batch, length, hidden = output.shape
        ids = torch.arange(batch).repeat_interleave(length)
        noise = source.of(step, ids, torch.arange(length).repeat(batch), hidden)
        bound = NEFTUNE / (length * hidden) ** 0.5  # transformers.integrations.neftune
        assert noise.abs().max() <= bound and noise.abs().max() > 0.99 * bound
        return output + noise.view_as(output)

    def count(done: int) -> None:
        nonlocal step
        step = done

    embedding = model.get_submodule("base_model.model.model.embed_tokens")
    embedding.register_forward_hook(add_noise)
    recipe, steps = Recipe.of(case.training), case.steps(STEPS)
    return train_alone(
        model, peft_solo.trainable(model), steps, recipe, lambda: peft_solo.export(model), after_step=count
    )


@pytest.mark.parametrize("name", TASKS)
def test_together_as_with_the_trainer_alone(
    name: str, path_of: PathOf, cases: list[Case], together: Trained
) -> None:
    case = next(case for case in cases if case.name == name)
    wanted = alone(path_of("llama"), case)
    for step, (result, loss, rate) in enumerate(
        zip(together.results[name], wanted.losses, wanted.learning_rates, strict=True)
    ):
        assert result.learning_rate == pytest.approx(rate, rel=1e-9, abs=1e-15), step
        assert result.loss == pytest.approx(loss, rel=LOSS), step
    assert_close(together.tensors[name], wanted.tensors, ADAPTER, name)


def test_a_neighbour_that_diverges_changes_no_task(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel, cases: list[Case], together: Trained
) -> None:
    section = lora(["q_proj"], r=4)
    exploding = {
        key: value * 1e25 for key, value in solo.random_adapter(path_of("llama"), section, seed=9).items()
    }
    wild = Case("wild", section, COMMON, random_records(8, 96, 6, 30, seed=1), exploding)
    beside = train(backbone_of("llama"), parallel, [*cases, wild], 6)
    assert beside.results["wild"][-1].status == "failed"
    for case in cases:
        assert beside.losses(case.name) == pytest.approx(together.losses(case.name)[:6], rel=1e-5), case.name


def test_a_resume_is_exact(backbone_of: BackboneOf, parallel: Parallel, cases: list[Case]) -> None:
    def run(leaves: bool) -> dict[str, dict[str, Tensor]]:
        engine = Engine(backbone_of("llama"), parallel)
        engine.register_tasks([case.task for case in cases])
        for step in range(4):
            if step == 2 and leaves:
                tasks = [case.task for case in cases]
                for task in tasks:
                    snapshot = engine.snapshot(task.spec.name)
                    task.resume = lambda snapshot=snapshot: snapshot
                    engine.remove_task(task.spec.name)
                engine.register_tasks(tasks)
            engine.step()
        found = {case.name: engine.adapter_tensors(case.name) or {} for case in cases}
        found = {name: {key: value.clone() for key, value in own.items()} for name, own in found.items()}
        for case in cases:
            engine.remove_task(case.name)
        return found

    whole, again = run(False), run(True)
    for name in TASKS:
        assert_same(again[name], whole[name], name)
