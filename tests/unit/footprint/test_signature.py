"""What of a task decides bytes, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_mux.footprint.signature import Signature
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.tasks import TaskSpec


def signature(adapter: dict[str, Any], training: dict[str, Any]) -> Signature:
    """Of a LoRA task."""
    section = {"peft_type": "LORA", "target_modules": ["q_proj"], **adapter}
    task = {
        "name": "a",
        "adapter": section,
        "data": {"path": "none"},
        "training": {"max_steps": 3, **training},
    }
    return Signature.of(TaskSpec.model_validate(task).plain())


def test_batches_rates_and_factors_do_not_make_a_signature() -> None:
    training = {
        "per_device_train_batch_size": 7,
        "learning_rate": 0.5,
        "seed": 3,
        "max_steps": 9,
        "warmup_steps": 2,
    }
    same = signature({"lora_alpha": 3, "lora_dropout": 0.1}, {**training, "weight_decay": 0.1})
    assert same == signature({"lora_dropout": 0.3}, {"report_to": "none", "weight_decay": 0.2})
    others: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"r": 32}, {}),
        ({"lora_dropout": 0.1}, {}),
        ({}, {"optim": "sgd"}),
        ({}, {"loss": "dpo"}),
        ({}, {"label_smoothing_factor": 0.1}),
    )
    found = {signature({}, {}), *(signature(adapter, training) for adapter, training in others)}
    assert len(found) == 1 + len(others)


@pytest.mark.parametrize(("rank", "taken"), [(1, 8), (8, 8), (9, 16), (64, 64), (100, 128)])
def test_a_rank_takes_as_much_as_the_next_power_of_two(rank: int, taken: int) -> None:
    found = signature({"r": rank}, {})
    assert found.rank == found.sections["adapter"]["r"] == taken
    assert found.family == signature({"r": 8}, {}).family


def test_ranks_that_differ_between_layers_are_part_of_the_family() -> None:
    found = signature({"r": 12, "rank_pattern": {"layers.1.q_proj": 4}}, {})
    assert found.rank == 0 and found.sections["adapter"]["r"] == 12


def test_matrices_cut_from_weights_keep_their_rank() -> None:
    found = signature({"r": 12, "init_lora_weights": "pissa"}, {})
    assert found.rank == 0 and found.sections["adapter"]["r"] == 12


def test_the_rank_counts_where_an_optimizer_has_buffers_of_one_size() -> None:
    assert signature({"r": 12}, {}).rank == 16
    for name, kind in OPTIMIZERS.items():
        found = signature({"r": 12}, {"optim": name})
        assert (found.rank, found.sections["adapter"]["r"]) == ((0, 12) if kind.at_once else (16, 16))
        assert found.at_least(64).sections["adapter"]["r"] == (12 if kind.at_once else 64)


@pytest.mark.parametrize(
    ("adapter", "training"),
    [
        ({"r": 100, "use_dora": True, "lora_dropout": 0.2}, {"optim": "sgd"}),
        ({}, {"loss": "dpo", "loss_type": "robust", "label_smoothing": 0.3}),
        ({}, {"label_smoothing_factor": 0.9, "neftune_noise_alpha": 5, "weight_decay": 0.5}),
    ],
)
def test_a_task_of_the_signature_has_the_signature(adapter: dict[str, Any], training: dict[str, Any]) -> None:
    found = signature(adapter, training)
    task = {"name": "a", "data": {"path": "none"}, **found.sections}
    task["training"] = {**found.sections["training"], "max_steps": 3}
    assert Signature.of(TaskSpec.model_validate(task).plain()) == found
