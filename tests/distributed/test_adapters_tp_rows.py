"""Rows of the vocabulary that tasks train themselves come out the same however the backbone is divided, fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.conftest import assert_no_problems
from tests.distributed.test_engine_layouts import LAYOUTS, Layout, Results, Tensors, differences, train_on
from tests.end_to_end.harness import Case, random_records

# Each policy and residence, and each way to divide, with tied and with untied matrices (GPT-2's vocabulary is padded).
PAIRS: dict[str, list[tuple[Layout, str, Kind]]] = {
    "llama": [
        (LAYOUTS[2], "spatial", "sharded"),
        (LAYOUTS[6], "in turns", "resident"),
    ],
    "gpt2": [
        (LAYOUTS[1], "chunks", "resident"),
        (LAYOUTS[8], "in turns", "resident"),
    ],
}


def cases_of(family: str) -> list[Case]:
    """Whole matrices, rows of tokens in both parts of the vocabulary, and a task without rows of its own."""
    embedding, targets = ("wte", ["c_attn"]) if family == "gpt2" else ("embed_tokens", ["q_proj", "v_proj"])
    fields: dict[str, dict[str, Any]] = {
        "both": {"modules_to_save": [embedding, "lm_head"]},
        "none": {},
        "tokens": {"trainable_token_indices": [80, 3, 50, 47]},
        "others": {"trainable_token_indices": {embedding: [7], "lm_head": [90, 11, 12]}},
    }
    training = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 8, "seed": 3}
    training |= {"weight_decay": 0.1, "max_grad_norm": 0.3}
    return [
        Case(
            name,
            {"peft_type": "LORA", "r": 4, "target_modules": targets, **own},
            training,
            random_records(9, 96, 3, 14, seed=len(name) + i),
        )
        for i, (name, own) in enumerate(fields.items())
    ]


@pytest.mark.parametrize("family", PAIRS)
def test_every_layout_gives_the_same_rows(
    family: str,
    once: Callable[[str, Callable[[Path], object]], Path],
    joined: Callable[..., Parallel],
) -> None:
    path = once(f"rows-{family}", lambda directory: tiny_models.make(directory, family)) / family
    cases = cases_of(family)
    wanted: tuple[Results, Tensors] = train_on(joined, path, cases, LAYOUTS[0], "spatial")
    problems: list[str] = []
    for layout, policy, residence in PAIRS[family]:
        found = train_on(joined, path, cases, layout, policy, residence)
        problems += differences(found, wanted, f"{layout} {policy} {residence}")
    assert_no_problems(problems)
