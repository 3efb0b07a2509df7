"""Models without weights, each built once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from megatron_mux.memory.tensors import Skeleton
from tests.unit.memory.configs import skeleton


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Skeleton]:
    """A model of `CONFIGS`, by its name."""
    return cache(lambda name: skeleton(name, tmp_path_factory.mktemp("config")))
