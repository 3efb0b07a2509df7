"""Each test leaves the world of processes and torch as it found them, also where it fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_mux import runtime


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Leave the world; a test that fails must not spoil the next one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
    runtime.shutdown()
