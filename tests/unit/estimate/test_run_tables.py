"""The planner's tables: made once for each question, on the first rank, or refused in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_mux.errors import UserError
from megatron_mux.estimate import run_tables
from megatron_mux.estimate.run_tables import RunTables
from megatron_mux.estimate.solve import NotLinear
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.signature import Signature
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.planning_context import PlanningContext
from tests.unit.fusion import backbone

SIGNATURES = [Signature("LORA", 8)]


class Tables:
    """In the place of those that make dry runs."""

    asked: list[tuple[Any, dict[str, Any]]]
    problem: Exception | None

    def __init__(self, run: Any, **how: Any) -> None:
        self.asked.append((run, how))

    def memory(self, signatures: Sequence[Signature]) -> Memory:
        if self.problem is not None:
            raise self.problem
        return backbone.MadeUpTables().memory(Mesh(), "none", signatures)


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> type[Tables]:
    monkeypatch.setattr(run_tables, "Tables", Tables)
    Tables.asked, Tables.problem = [], None
    return Tables


def source(kind: str = "cpu", **more: Any) -> RunTables:
    profile = replace(backbone.profile(), about={"device": "H100", "kind": kind})
    return RunTables(PlanningContext(profile, backbone.info()), None, lambda text: None, **more)


def test_what_was_asked_is_remembered(tables: type[Tables]) -> None:
    made = source()
    first = made.memory(Mesh(), "none", SIGNATURES, True)
    assert made.memory(Mesh(), "none", SIGNATURES, True) is first
    for other in (
        (Mesh(pipeline=2), "none", SIGNATURES, True),
        (Mesh(), "full", SIGNATURES, True),
        (Mesh(), "none", [*SIGNATURES, Signature("IA3", 0)], True),
        (Mesh(), "none", SIGNATURES, False),
    ):
        assert made.memory(*other) is not first
    assert len(tables.asked) == 5


def test_lengths_matter_on_a_cpu_only(tables: type[Tables]) -> None:
    on_gpu = source("cuda")
    assert on_gpu.memory(Mesh(), "none", SIGNATURES, True) is on_gpu.memory(Mesh(), "none", SIGNATURES, False)
    source().memory(Mesh(), "none", SIGNATURES, True)
    (gpu, of_gpu), (cpu, of_cpu) = tables.asked
    assert (gpu.device, of_gpu["short"], of_gpu["tolerance"]) == ("cuda", False, 0.02)
    assert (cpu.device, of_cpu["short"], of_cpu["tolerance"]) == ("cpu", True, 0.05)


def test_ranks_are_those_of_the_mesh(tables: type[Tables]) -> None:
    mesh = Mesh(2, 2, 3, split=(2, 2, 2, 2))
    source().memory(mesh, "selective", SIGNATURES, True)
    ((run, _),) = tables.asked
    assert (run.tensor, run.plan.stages, run.plan.virtual, run.plan.data) == (2, 4, 2, 3)
    assert (run.plan.split, run.recompute, run.world) == (mesh.split, "selective", 12)
    assert run.dtype == "float32" and run.config["model_type"] == "llama"


def test_one_rank_makes_them_for_all(tables: type[Tables]) -> None:
    elsewhere = backbone.MadeUpTables().memory(Mesh(), "none", SIGNATURES)
    shared: list[Callable[[], Memory]] = []

    def share(made: Callable[[], Memory]) -> Memory:
        shared.append(made)
        return elsewhere

    made = source(share=share)
    assert made.memory(Mesh(), "none", SIGNATURES, True) is elsewhere
    assert made.memory(Mesh(), "none", SIGNATURES, True) is elsewhere
    assert len(shared) == 1 and not tables.asked


def test_what_cannot_be_predicted_is_said(tables: type[Tables]) -> None:
    tables.problem = NotLinear("F of group (0,): 5 of 9")
    with pytest.raises(UserError, match=r"cannot be predicted \(F of group .*: plan without a memory limit"):
        source().memory(Mesh(), "none", SIGNATURES, True)
