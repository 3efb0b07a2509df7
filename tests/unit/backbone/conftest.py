"""Tiny checkpoints, made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_mux import runtime
from megatron_mux.runtime import Parallel
from tests import tiny_models


@pytest.fixture(scope="session")
def parallel() -> Parallel:
    """This process alone, on the CPU."""
    return runtime.initialize(device="cpu")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints(name, sharded=False)`: a tiny model's directory, not to be changed."""
    base, made = tmp_path_factory.mktemp("tiny"), {}

    def get(name: str, sharded: bool = False) -> Path:
        if (name, sharded) not in made:
            made[name, sharded] = tiny_models.make(base, name, sharded)
        return made[name, sharded]

    return get


@pytest.fixture
def copied(checkpoints: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Likewise, but a copy that the test may spoil."""

    def get(name: str, sharded: bool = False) -> Path:
        return Path(shutil.copytree(checkpoints(name, sharded), tmp_path / name))

    return get
