"""The `data` section."""

from __future__ import annotations

from pydantic import Field

from megatron_mux.section import LARGEST_COUNT, FilePath, Section


class DataSpec(Section):
    """The training data of a task."""

    path: FilePath
    """JSON Lines file; see `megatron_mux.data.records` for the shapes of a record."""
    max_length: int = Field(default=1024, ge=2, le=LARGEST_COUNT)
    """Tokens a sequence is cut to, on the right."""
    shuffle: bool = True
    """Each epoch in an order drawn from the task's seed; false keeps the file's order."""
