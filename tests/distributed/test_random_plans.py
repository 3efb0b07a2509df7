"""Random plans run on four processes without a hang and compute what they should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_mux.runtime import Parallel
from tests.distributed.random_plans import run_all


@pytest.mark.parametrize("stages", [4, 2])
def test_random_plans_run(stages: int, joined: Callable[..., Parallel]) -> None:
    run_all(joined(1, stages))
