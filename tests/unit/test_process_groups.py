"""Process groups beside those of Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_mux import process_groups, runtime

CPU = torch.device("cpu")


@pytest.fixture
def limit() -> Iterator[timedelta]:
    """The world's time limit, another one than torch's default."""
    runtime.initialize(device="cpu")
    world: Any = dist.group.WORLD
    before = world._get_backend(CPU).options._timeout
    wanted = timedelta(minutes=7)
    dist.distributed_c10d._set_pg_timeout(wanted)
    yield wanted
    dist.distributed_c10d._set_pg_timeout(before)


def test_a_group_has_the_time_limit_of_the_world(limit: timedelta) -> None:
    group: Any = process_groups.new_group([0], CPU, "gloo")
    assert group._get_backend(CPU).options._timeout == limit
    dist.destroy_process_group(group)


def test_a_group_of_a_link_has_the_time_limit_of_the_world(
    limit: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL is not there: what it would be asked for."""
    asked: dict[str, Any] = {}
    options = SimpleNamespace(config=SimpleNamespace())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda: options), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **named: asked.update(named))
    process_groups._pair_group([1, 2], CPU)
    assert asked["backend"] == "nccl" and asked["pg_options"] is options
    assert asked["timeout"] == options._timeout == limit and options.config.max_ctas == 4
