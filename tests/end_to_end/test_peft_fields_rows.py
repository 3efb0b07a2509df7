"""Rows of the embedding and of the output layer that a task trains itself: as peft trains, stores and loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_mux.runtime import Parallel
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.harness import Case, assert_close, random_records, train
from tests.reference import peft_solo

STEPS = 20
LOSSES = 1e-4
BOTH = {"embed_tokens": [7, 3, 90, 41], "lm_head": [7, 3, 90, 41]}
FIELDS: dict[str, dict[str, Any]] = {
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": [7, 3, 90, 41]},
    "tokens of both": {"trainable_token_indices": BOTH},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [90, 7]}},
    "other tokens": {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [90, 7, 50]}},
    "tokens and embedding": {
        "modules_to_save": ["embed_tokens"],
        "trainable_token_indices": {"lm_head": [90, 7]},
    },
}
TRAINING = {
    "per_device_train_batch_size": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "max_steps": STEPS,
    "seed": 4,
}


def section(fields: dict[str, Any], family: str = "llama") -> dict[str, Any]:
    """A LoRA with these fields."""
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets, **fields}


def make_case(path: Path, name: str, adapter: dict[str, Any], vocab: int = 96) -> Case:
    """A task that starts from random values in every tensor."""
    records = random_records(9, vocab, 3, 22, seed=len(name))
    initial = peft_solo.random_adapter(path, adapter, seed=5)
    return Case(name.replace(" ", "-"), adapter, TRAINING, records, initial)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_tasks_train_as_with_peft(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    """All of them in one batch, each against peft alone."""
    path = path_of(family)
    cases = [make_case(path, name, section(fields)) for name, fields in FIELDS.items()]
    trained = train(backbone_of(family), parallel, cases, STEPS)
    for case in cases:
        assert case.initial is not None
        alone = peft_solo.train_solo(path, case.adapter, case.training, case.steps(STEPS), case.initial)
        assert trained.losses(case.name) == pytest.approx(alone.losses, rel=LOSSES), case.name
        norms = [result.grad_norm for result in trained.results[case.name]]
        assert norms == pytest.approx(alone.grad_norms, rel=1e-3), case.name
        assert_close(trained.tensors[case.name], alone.tensors, 2e-3, case.name)
