"""The body of split fine-tuning on four ranks computes what it computes on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_mux.runtime import Parallel
from tests.distributed.split_ranks import check


@pytest.mark.parametrize(
    ("tensor", "pipeline", "together"), [(2, 2, False), (2, 2, True), (1, 4, True)], ids=str
)
def test_four_ranks_are_as_one(
    joined: Callable[..., Parallel], once: Callable[..., Path], tensor: int, pipeline: int, together: bool
) -> None:
    check(joined, once, tensor, pipeline, together)
