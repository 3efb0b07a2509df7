"""The `eval` section."""

from __future__ import annotations

from pydantic import Field

from megatron_mux.section import LARGEST_BATCH, LARGEST_COUNT, FilePath, Section

TOKENS_PER_PASS = 2048
"""Of an evaluation: large enough to use the processor well, small enough to bound activations."""


class EvalSpec(Section):
    """Held-out records, and when to evaluate on them."""

    path: FilePath
    """JSON Lines file of held-out records."""
    eval_steps: int = Field(default=500, ge=1, le=LARGEST_COUNT)
    """Evaluate every so many of the task's steps, besides at its beginning and end."""
    per_device_eval_batch_size: int | None = Field(default=None, ge=1, le=LARGEST_BATCH)
    """Maximum number of sequences evaluated together; None: as many as fill a pass. Affects memory, not results."""
