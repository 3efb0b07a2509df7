"""What `pipeline.py` compares."""

from __future__ import annotations

from typing import Any

LENGTHS = (128, 64, 64, 32, 32, 16)
"""`max_length` of each task."""

TOKENS = 128
"""Of a micro-batch of every task."""

# What is compared, by records and micro-batches of each task; the goals of sides against Megatron-Core's 1F1B and of
# megatron-mux against spatial batching.
CASES: tuple[dict[str, Any], ...] = (
    {"records": "same shapes", "micro_batches": 4, "steps": 6, "goal": 1.18, "over_spatial": 1.1},
    {"records": "same shapes", "micro_batches": 16, "steps": 2, "goal": 1.04, "over_spatial": None},
    {"records": "padded", "micro_batches": 4, "steps": 6, "goal": 1.4, "over_spatial": None},
)
SIDES = ("megatron", "spatial", "temporal", "auto")
