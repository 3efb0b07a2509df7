"""The body of split fine-tuning on two ranks computes what it computes on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_mux.runtime import Parallel
from tests.distributed.split_ranks import check


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)], ids=["TP2", "PP2"])
def test_two_ranks_are_as_one(
    joined: Callable[..., Parallel], once: Callable[..., Path], tensor: int, pipeline: int
) -> None:
    check(joined, once, tensor, pipeline, together=True)
