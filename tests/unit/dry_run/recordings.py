"""Tasks for dry runs, and what tests read off a recording of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_mux.dry_run.run_spec import STEP, Recording, TaskRecords

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
    "scales": {
        "peft_type": "IA3",
        "target_modules": ["k_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "bottle": {"peft_type": "BOTTLENECK", "bottleneck_size": 4, "target_modules": ["down_proj"]},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
    "sparse": {"peft_type": "DIFF_PRUNING", "sparsity": 0.9, "l0_weight": 0.1, "target_modules": ["q_proj"]},
}
"""Adapters."""


def task_of(
    name: str,
    adapter: dict[str, Any],
    training: dict[str, Any],
    lengths: Sequence[int],
    *evaluation: Sequence[int],
) -> TaskRecords:
    """A task with records of these lengths, each with 8 labels."""
    data = {"path": "none", "max_length": 64}
    spec = {"name": name, "adapter": adapter, "data": data, "training": training}
    return TaskRecords(spec, list(lengths), [8] * len(lengths), *map(list, evaluation))


def begins(recording: Recording) -> list[int]:
    """Number of events before each step."""
    return [index for index, what in recording.marks if what == STEP]


def held(recording: Recording) -> int:
    """Bytes allocated before the first step: weights, adapters, optimizers."""
    first = begins(recording)[0]
    return recording.stream.live()[first - 1] if first else 0


def last_step_peak(recording: Recording) -> int:
    """Peak bytes from the last step on."""
    return max(recording.stream.live()[max(begins(recording)[-1] - 1, 0) :], default=0)
