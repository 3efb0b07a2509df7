"""Random plans run on four processes without a hang and compute what they should; spoilt ones send nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_mux.runtime import Parallel
from tests.distributed.random_plans import run_all
from tests.distributed.spoilt_plans import refuse_plans, refuse_templates

pytestmark = pytest.mark.parametrize("stages", [4, 2])


def test_random_plans_run(stages: int, joined: Callable[..., Parallel]) -> None:
    run_all(joined(1, stages))


def test_spoilt_templates_are_refused_before_anything_is_sent(
    stages: int, joined: Callable[..., Parallel]
) -> None:
    refuse_templates(joined(1, stages))


def test_spoilt_plans_are_refused_before_anything_is_sent(
    stages: int, joined: Callable[..., Parallel]
) -> None:
    refuse_plans(joined(1, stages))
