"""The planner's tables: made once for each question, on the first rank, or refused in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from megatron_mux.dry_run.process import end_worker
from megatron_mux.errors import UserError
from megatron_mux.estimate import run_tables
from megatron_mux.estimate.run_tables import RunTables
from megatron_mux.estimate.solve import NotLinear
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.signature import Signature
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.memory.worker import WorkerError
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


def source(kind: str = "cpu", itemsize: int = 2, device: str = "H100", **more: Any) -> RunTables:
    profile = replace(backbone.profile(), about={"device": device, "kind": kind})
    context = PlanningContext(profile, backbone.info(), itemsize=itemsize)
    return RunTables(context, None, lambda text: None, **more)


def test_what_is_known_serves_those_who_ask_for_some_of_it(tables: type[Tables]) -> None:
    made = source()
    both = [Signature("IA3", 0), *SIGNATURES]
    first = made.memory(Mesh(), "none", both, False)
    assert made.memory(Mesh(), "none", SIGNATURES, False) is first
    assert made.memory(Mesh(), "none", SIGNATURES, True) is first, "tables for any lengths serve short ones"
    assert len(tables.asked) == 1


def test_the_tasks_of_a_run_are_predicted_at_once(tables: type[Tables]) -> None:
    loads = backbone.random_loads(1, 5)
    context = PlanningContext(backbone.profile(), backbone.info(), tasks=loads)
    every = sorted({load.signature(backbone.shape()) for load in loads.values()})
    assert len(every) > 1
    made = RunTables(context, None, lambda text: None)
    assert made.memory(Mesh(), "none", every[:1], True).signatures == every
    assert len(tables.asked) == 1


def test_only_where_all_ranks_ask_is_anything_predicted() -> None:
    """A plan is made in a thread of the first rank, which the others do not wait for."""
    made = source()
    known = made.memory(Mesh(), "none", SIGNATURES, True)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(made.memory, Mesh(), "none", SIGNATURES, True).result() is known
        with pytest.raises(UserError, match="has not been predicted yet"):
            thread.submit(made.memory, Mesh(), "full", SIGNATURES, True).result()


def test_lengths_matter_on_a_cpu_only(tables: type[Tables]) -> None:
    on_gpu = source("cuda")
    assert on_gpu.memory(Mesh(), "none", SIGNATURES, True) is on_gpu.memory(Mesh(), "none", SIGNATURES, False)
    source().memory(Mesh(), "none", SIGNATURES, True)
    (gpu, of_gpu), (cpu, of_cpu) = tables.asked
    assert (gpu.device, of_gpu["short"]) == ("cuda", False)
    assert (cpu.device, of_cpu["short"]) == ("cpu", True)


def test_ranks_are_those_of_the_mesh(tables: type[Tables]) -> None:
    mesh = Mesh(2, 2, 3, split=(2, 2, 2, 2))
    source().memory(mesh, "selective", SIGNATURES, True)
    ((run, _),) = tables.asked
    assert (run.tensor, run.plan.stages, run.plan.virtual, run.plan.data) == (2, 4, 2, 3)
    assert (run.plan.split, run.recompute, run.world) == (mesh.split, "selective", 12)
    assert run.dtype == "bfloat16" and run.config["model_type"] == "llama"


def test_tasks_that_join_are_predicted_in_the_background(tables: type[Tables]) -> None:
    """On the first rank; whoever asks for some of them then gets all, and nobody prepares what is known."""
    joined = [Signature("IA3", 0), *SIGNATURES]
    first, other = source("cuda"), source("cuda", leads=False)
    for made in (first, other):
        made.memory(Mesh(), "none", SIGNATURES, True)
        assert made.prepare(Mesh(), "none", SIGNATURES, True) is None
    work = first.prepare(Mesh(), "none", joined, True)
    assert work is not None and other.prepare(Mesh(), "none", joined, True) is None
    assert isinstance(work.exception(), UserError | WorkerError), "these signatures are no tasks"
    for made in (first, other):
        assert made.memory(Mesh(), "none", joined[:1], False).signatures == joined
        assert made.prepare(Mesh(), "none", joined[:1], False) is None
        assert made.memory(Mesh(), "full", joined[:1], False).signatures == joined[:1]
    end_worker()


def test_one_that_cannot_be_predicted_harms_no_others(
    tables: type[Tables], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that joins may ask for what the backbone does not have, and is refused; those that wait are not."""
    made = source(leads=False)
    bad, fine = Signature("none", 0), Signature("IA3", 0)
    memory = Tables.memory

    def refusing(self: Tables, signatures: Sequence[Signature]) -> Memory:
        if bad in signatures:
            raise WorkerError("it targets no module")
        return memory(self, signatures)

    monkeypatch.setattr(Tables, "memory", refusing)
    made.prepare(Mesh(), "none", [fine, bad], True)
    assert made.memory(Mesh(), "none", [fine], True).signatures == [fine]
    with pytest.raises(UserError, match="targets no module"):
        made.memory(Mesh(), "none", [bad], True)


def test_short_sequences_are_prepared_for_short_ones(tables: type[Tables]) -> None:
    made = source(leads=False)
    joined = [Signature("IA3", 0), *SIGNATURES]
    made.prepare(Mesh(), "none", joined, True)
    assert made.memory(Mesh(), "none", SIGNATURES, False).signatures == SIGNATURES
    assert made.memory(Mesh(), "none", joined[:1], True).signatures == joined


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
