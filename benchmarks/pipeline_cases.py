"""The tasks, cases and sides that `pipeline.py` compares."""

from __future__ import annotations

from typing import Any

LENGTHS = (128, 64, 64, 32, 32, 16)
"""`max_length` of each task."""

TOKENS = 128
"""Tokens in a micro-batch of each task."""

# `micro_batches` are those of each task; `goal` is the speed-up to reach over Megatron-Core's 1F1B, `over_spatial` the
# one over spatial batching.
CASES: tuple[dict[str, Any], ...] = (
    {"records": "same shapes", "micro_batches": 4, "steps": 6, "goal": 1.18, "over_spatial": 1.1},
    {"records": "same shapes", "micro_batches": 16, "steps": 2, "goal": 1.04, "over_spatial": None},
    {"records": "padded", "micro_batches": 4, "steps": 6, "goal": 1.4, "over_spatial": None},
)
SIDES = ("megatron", "spatial", "temporal", "auto")
PICTURED = {
    "megatron": "Megatron-Core's 1F1B, one task after another",
    "auto": "megatron-mux, the same tasks together",
}
"""Sides that `--picture` draws, from top to bottom, and what it calls them."""
