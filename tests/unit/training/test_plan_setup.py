"""From flags to plans: the memory limit and the recomputation where no flag gives one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch

from megatron_mux.backbone.registry import info_without_weights
from megatron_mux.errors import UserError
from megatron_mux.estimate.run_tables import RunTables
from megatron_mux.footprint.memory import Memory
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner, choose_recompute
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.memory.forms.method import Recompute
from megatron_mux.training import plan_setup
from megatron_mux.training.plan_setup import memory_limit
from tests.end_to_end.harness import make_spec
from tests.unit.fusion import backbone
from tests.unit.memory.traced import LLAMA

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


def limit(
    said: list[str],
    parallel: Any,
    given: Any = "auto",
    policy: str = "auto",
    mesh: Mesh = Mesh(),  # noqa: B008 (frozen)
) -> float | None:
    arguments: Any = SimpleNamespace(mux_memory_limit=given, mux_policy=policy)
    return memory_limit(arguments, mesh, parallel, said.append)


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


@pytest.mark.parametrize("mesh", [Mesh(managers=2, expert_tensor=1), Mesh(2, expert_tensor=1)])
def test_there_is_none_where_memory_is_not_predicted(said: list[str], mesh: Mesh) -> None:
    assert limit(said, rank("cuda"), mesh=mesh) is None
    with pytest.raises(UserError, match="--mux-memory-limit: memory is not predicted"):
        limit(said, rank("cuda"), 5 * GIB, mesh=mesh)
    assert limit(said, rank("cuda"), 5 * GIB, mesh=Mesh(2, expert=2, expert_tensor=1)) == 5 * GIB


def fits(context: PlanningContext, recompute: Recompute, limit: float) -> bool:
    """Whether the tasks fit into so many bytes."""
    try:
        Planner(replace(context, recompute=recompute, memory_limit=limit)).check(context.tasks)
    except UserError:
        return False
    return True


def needed(context: PlanningContext, recompute: Recompute) -> float:
    """The least bytes into which the tasks fit."""
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(context, recompute, middle) else (middle, high)
    return high


def test_a_gpu_recomputes_layers_where_a_task_does_not_fit_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 512, "num_hidden_layers": 16}))
    info = info_without_weights(tmp_path)
    spec = make_spec("task", {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}, {"max_steps": 2})
    loads = {"task": TaskLoad.of(spec, np.array([2048], np.int32), np.array([8], np.int32), info.shape)}
    profile = roofline(info.shape, {"device": "H100", "kind": "cuda", "threads": 1}, 2, 1)
    context = PlanningContext(profile, info, itemsize=2, tasks=loads)
    context = replace(context, tables=RunTables(context, None, lambda text: None))
    least = {recompute: needed(context, recompute) for recompute in get_args(Recompute)}
    assert least["full"] < least["selective"] < least["none"], "attention's output alone is not kept"

    def chosen(limit: float | None, device: str = "cuda", asked: str | None = None) -> str:
        said: list[str] = []
        limited = replace(context, memory_limit=limit)
        found = choose_recompute(limited, device, asked, lambda tried: tried, said.append)
        assert found.memory_limit == limit and bool(said) == (found.recompute == "full")
        return found.recompute

    assert chosen(None) == chosen(least["none"]) == "none"
    assert chosen(least["none"] - 1) == chosen(least["full"]) == "full"
    assert chosen(least["full"] - 1) == "full", "the planner then says what does not fit"
    assert chosen(least["full"], device="cpu") == chosen(least["full"], asked="selective") == "none"


class Unpredicted:
    """A `MemorySource` that knows nothing."""

    def memory(self, *_: Any) -> Memory:
        raise UserError("memory cannot be predicted")

    def prepare(self, *_: Any) -> None:
        pass


def test_what_cannot_be_predicted_drops_a_limit_that_nobody_asked_for() -> None:
    context = PlanningContext(backbone.profile(), backbone.info(), tasks=backbone.random_loads(1, 2))
    limited = replace(context, memory_limit=1e9, tables=Unpredicted())
    said: list[str] = []
    default, asked = (SimpleNamespace(mux_memory_limit=given) for given in ("auto", GIB))
    found = plan_setup._predictable(limited, cast(Any, default), said.append)
    assert found == context and said == ["planning without a limit of memory: memory cannot be predicted"]
    with pytest.raises(UserError, match="cannot be predicted"):
        plan_setup._predictable(limited, cast(Any, asked), said.append)
    with pytest.raises(UserError, match="cannot be predicted"):  # which is no reason to recompute layers
        choose_recompute(limited, "cuda", None, lambda tried: tried, said.append)
    assert len(said) == 1
