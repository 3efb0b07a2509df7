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
from megatron_mux.engine import Engine, engine

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


@pytest.mark.parametrize("rank", [4, 7])
def test_a_link_is_connected_in_its_own_direction_with_the_worlds_time_limit(
    rank: int, limit: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL, which connects the two directions between two ranks apart, is not there: what it would be asked for."""
    done: list[tuple[str, int, object]] = []

    def new_group(ranks: list[int], **named: Any) -> object:
        options = named["pg_options"]
        assert sorted(ranks) == [4, 7] and named["backend"] == "nccl"
        assert named["timeout"] == options._timeout == limit and options.config.max_ctas == 4
        return object()

    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda rings, ring: rings.__setitem__(0, ring))
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "send", lambda flag, to, group: done.append(("send", to, group)))
    monkeypatch.setattr(dist, "recv", lambda flag, source, group: done.append(("receive", source, group)))
    groups = process_groups.pair_groups([4, 7], [(0, 1)], CPU)
    forward, backward = groups[(0, 1), False], groups[(0, 1), True]
    verbs = ("send", "receive") if rank == 4 else ("receive", "send")
    assert done == [(verbs[0], 11 - rank, forward), (verbs[1], 11 - rank, backward)]


def test_messages_have_a_group_of_few_ctas(limit: timedelta, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks make all groups, in one order; each joins its own once."""
    asked: list[tuple[list[int], Any]] = []
    joined: list[object] = []

    def new_group(ranks: list[int], **named: Any) -> str:
        assert named["backend"] == "nccl" and named["timeout"] == named["pg_options"]._timeout == limit
        asked.append((ranks, named["pg_options"]))
        return f"group of {ranks}"

    def gather(found: list[Any], own: list[int]) -> None:
        assert own == [2, 3]
        found[:] = [[2, 3], [2, 3], [0, 1], [0, 1]]

    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [2, 3])
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "all_reduce", lambda flag, group: joined.append(group))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    places: Any = SimpleNamespace(tp_group="tensor", device=CPU)
    found: Any = process_groups.bounded_tensor_group(places, 12)
    assert found == "group of [2, 3]"
    assert [ranks for ranks, _ in asked] == [[0, 1], [2, 3]] and joined == ["group of [2, 3]"]
    assert all(own.config.max_ctas == 12 and own.is_high_priority_stream for _, own in asked)


def test_groups_of_several_ranks_are_connected_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda flag, group: joined.append(group))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: joined.append("synchronize"))
    places: Any = SimpleNamespace(
        tp_group="tensor",
        tp_size=2,
        dp_group="data",
        dp_size=1,
        world_size=4,
        device=CPU,
        experts=SimpleNamespace(connect=lambda device: joined.append("managers")),
    )
    process_groups.connect(places)
    assert joined == []
    monkeypatch.setattr(process_groups, "is_gpu", lambda device: True)
    process_groups.connect(places)
    assert joined == ["tensor", None, "managers", "synchronize"]


def test_an_engine_connects_groups_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[object] = []
    monkeypatch.setattr(engine, "connect", connected.append)
    monkeypatch.setattr(engine, "AdapterSet", lambda *of: SimpleNamespace(use=lambda kernels: None))
    parallel = runtime.initialize(device="cpu")
    found = {"base_ops": list, "dtype": torch.float32, "shape": None, "in_step": False}
    found |= {"module_weight": None, "vocabulary_parts": None}
    stage: Any = SimpleNamespace(**found)
    Engine([stage], parallel)
    assert connected == [parallel]
