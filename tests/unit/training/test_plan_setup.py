"""From flags to plans: the memory limit where no flag gives one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mux.training import plan_setup
from megatron_mux.training.plan_setup import memory_limit

GIB = 1 << 30


def rank(device: str, *others: float) -> Any:
    """One of several ranks: the others' GPUs have so many GiB."""

    def most(values: Sequence[float]) -> list[float]:
        return [max(value, *(-other * GIB for other in others)) for value in values]

    return SimpleNamespace(device=torch.device(device), most=most if others else list)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return []


def limit(said: list[str], parallel: Any, given: Any = "auto", policy: str = "auto") -> float | None:
    arguments: Any = SimpleNamespace(mux_memory_limit=given, mux_policy=policy)
    return memory_limit(arguments, parallel, said.append)


def test_a_gpu_has_what_it_has_less_a_margin(said: list[str]) -> None:
    assert limit(said, rank("cuda")) == 80 * GIB * (1 - plan_setup._MARGIN) == 75 * GIB
    assert "75" in said[0] and "--mux-memory-limit" in said[0]


def test_all_ranks_agree_on_the_smallest_gpu(said: list[str]) -> None:
    assert limit(said, rank("cuda", 40, 160)) == 37.5 * GIB


def test_who_gives_one_has_it_and_who_wants_none_has_none(said: list[str]) -> None:
    assert limit(said, rank("cuda"), 5 * GIB) == 5 * GIB
    assert limit(said, rank("cuda"), None) is None
    assert not said


def test_without_a_planner_or_a_gpu_there_is_none(said: list[str]) -> None:
    assert limit(said, rank("cuda"), policy="spatial") is None
    assert limit(said, rank("cpu")) is None
    assert not said
