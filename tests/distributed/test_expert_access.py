"""What steps select, counted on all ranks, against the router's logits in transformers; and what follows from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_mux.backbone.model import load_stages
from megatron_mux.backbone.registry import read_shape
from megatron_mux.engine import Engine, Planning
from megatron_mux.errors import SharedError
from megatron_mux.expert_shape import Placement
from megatron_mux.moe.access_counts import Access, AccessCounts
from megatron_mux.moe.topology import Topology
from megatron_mux.runtime import Parallel
from megatron_mux.training.expert_placer import ExpertPlacer, moved
from megatron_mux.training.expert_topology import topology_of_hosts
from tests.distributed.test_expert_layouts import Layout, cases_of
from tests.end_to_end.harness import Case
from tests.exact_model import exact_model

Joined = Callable[..., Parallel]
NAMES = ("lora", "experts", "high")


@pytest.fixture
def checkpoint(model_of: Callable[[str], Path]) -> Path:
    return model_of("mixtral")


def engine_of(joined: Joined, path: Path, layout: Layout, cases: list[Case], **more: Any) -> Engine:
    sizes = (layout.tensor, layout.pipeline, layout.tensor > 1, layout.expert, layout.expert_tensor)
    parallel = joined(*sizes, layout.managers)
    placement = None
    if layout.managers:
        placement = Placement(4, dict.fromkeys(range(4), tuple((1 + e % 3,) for e in range(5))))
    stages = load_stages(path, parallel, torch.float64, layout.recompute, placement=placement)
    engine = Engine(stages, parallel, Planning("spatial", layout.pipeline), **more)
    engine.register_tasks([case.task for case in cases])
    return engine


def counts_of_transformers(path: Path, cases: list[Case], labelled_only: bool) -> dict[str, np.ndarray]:
    """[L][E] tokens of each task's first step that select each expert; in the last layer labelled ones if so."""
    model = exact_model(path)
    found = {}
    for case in cases:
        counts = np.zeros((4, 5), np.int64)
        for tokens, labelled in case.steps(1)[0]:
            routed = model(tokens.unsqueeze(0), output_router_logits=True).router_logits
            for layer, logits in enumerate(routed):
                kept = logits[:-1][labelled[1:]] if labelled_only and layer == 3 else logits
                chosen = kept.topk(2, dim=-1).indices.flatten()
                counts[layer] += np.bincount(chosen.numpy(), minlength=5)
        found[case.name] = counts
    return found


def test_counts_are_those_of_transformers(checkpoint: Path, joined: Joined) -> None:
    """Each row once, whether it is computed again or tried before; no padding, and no evaluation."""
    cases = [case for case in cases_of(96) if case.name in NAMES]
    wanted = {kind: counts_of_transformers(checkpoint, cases, kind) for kind in (True, False)}
    for layout, more in (
        (Layout(1, 1, 4), {"tries_plans": True}),
        (Layout(1, 2, 2, recompute="full"), {}),
        (Layout(2, 1, 2, 2), {}),  # whose tensor ranks divide and pad the rows
        (Layout(1, 1, 1, managers=3), {}),
    ):
        own = [case for case in cases if layout.expert_tensor == 1 or case.name != "experts"]
        engine = engine_of(joined, checkpoint, layout, own, **more)
        counts = AccessCounts(engine.stages.values())
        engine.evaluate("lora", own[0].records.as_dataset())
        with counts.counting():
            engine.step()
        access = counts.take(engine.parallel, engine.slots, pairs=True)
        assert access.by_task.keys() == {case.name for case in own}
        for name, found in access.by_task.items():
            assert found.tolist() == wanted[layout.tensor == 1][name].tolist(), (layout, name)
        assert access.together is not None
        pairs = access.together.sum(axis=(1, 2)) / 4  # K x K of a row; one in eight rows of a pass on a rank
        rows = access.selected.sum(axis=1) / 2
        assert (pairs >= rows / 8).all() and (pairs <= rows / 4 + 4).all(), (pairs, rows)
        assert counts.take(engine.parallel, engine.slots).selected.sum() == 0
        if engine.parallel.experts.holds_rows:
            assert counts.cpu_s > 0


def topology(bandwidth: float) -> Topology:
    """Four workers, the last of which computes slowly."""
    speeds = (0.0, 0.0, 0.0, 1e-3)
    workers = [{"node": "a", "capacity": 8, "seconds_per_row": seconds} for seconds in speeds]
    return Topology.model_validate(
        {"workers": workers, "bandwidth": {"within_node": bandwidth, "between_nodes": bandwidth}}
    )


def selecting(hot: int, share: float) -> Access:
    """Every layer selects expert 1, and an expert so often, and the others alike."""
    rows = np.full((4, 5), round(1000 * (1 - share) / 3))
    rows[:, hot], rows[:, 1] = round(1000 * share), 1000
    rows[:, 0] += 2000 - rows.sum(axis=1)
    return Access((0, 1, 2, 3), {"one": rows})


def test_experts_move_when_that_pays(checkpoint: Path, joined: Joined) -> None:
    engine = engine_of(joined, checkpoint, Layout(1, 1, 4), cases_of(96)[:1])
    shape = read_shape(checkpoint)
    assert shape.experts is not None
    placer = ExpertPlacer(engine, engine.parallel, topology(1e12), assumed=True)
    before = placer.rows
    assert before[0] == ((0,), (0,), (1,), (2,), (3,))
    # Expert 4, on the slow worker, is used by hardly any row: little to gain.
    assert placer.decide(selecting(2, 0.999), 1000, 1000) is None
    skewed = selecting(4, 0.9)
    dear = ExpertPlacer(engine, engine.parallel, topology(1.0), assumed=True)
    assert dear.decide(skewed, 1000, 1) is None
    decision = placer.decide(skewed, 1000, 1000)
    assert decision is not None and decision.after < decision.before / 5
    # Solved anew, too, moves have to pay: they are compared with where experts are.
    assert dear.decide(skewed, 10, 1, anew=True) is None
    solved = placer.decide(skewed, 1000, 1000, anew=True)
    assert solved is not None and solved.before == decision.before and solved.cost > 0
    assert solved.after + solved.cost / 1000 <= (decision.after + decision.cost / 1000) * (1 + 1e-9)
    moves = moved(before, decision.rows, placer.layers)
    assert sorted({move[0] for move in moves}) == [0, 1, 2, 3]
    assert len(moves) == 4, moves  # the expert alone: there is room where it goes
    size, seconds = placer.move(decision)
    one = 3 * shape.hidden * shape.experts.ffn * 8
    assert size == 4 * one and seconds > 0 and placer.rows == decision.rows
    assert placer.decide(skewed, 1000, 1000) is None


def test_a_search_that_fails_keeps_no_rank_waiting(
    checkpoint: Path, joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank, which searches, raises what went wrong as it is."""
    engine = engine_of(joined, checkpoint, Layout(1, 1, 4), cases_of(96)[:1])
    placer = ExpertPlacer(engine, engine.parallel, topology(1e12), assumed=True)

    def fail(*_: object) -> None:
        raise KeyError("made to fail")

    monkeypatch.setattr(placer, "_improve", fail)
    with pytest.raises(SharedError if engine.parallel.rank else KeyError, match="made to fail"):
        placer.decide(selecting(4, 0.9), 1000, 1000)


def test_a_given_topology_is_measured(checkpoint: Path, joined: Joined) -> None:
    """What moving takes is measured before it is compared with what it gains."""
    engine = engine_of(joined, checkpoint, Layout(1, 1, 1, managers=3), cases_of(96)[:1])
    workers = [{"node": node, "capacity": 10} for node in "abb"]
    content = {
        "workers": workers,
        "master_node": "a",
        "bandwidth": {"within_node": 1e15, "between_nodes": 1e3},
    }
    placer = ExpertPlacer(engine, engine.parallel, Topology.model_validate(content), assumed=False)
    decision = placer.decide(selecting(4, 0.9), 1000, 10**9)
    assert decision is not None and decision.cost > 0
    assert decision.cost != decision.sent
    measured = decision.cost / decision.sent  # links between nodes are not really that slow
    assert measured < 1
    assert placer.move(decision)[0] > 0 and placer.rows == decision.rows


def test_links_are_measured_without_a_topology(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = joined(1, 1, managers=3)
    monkeypatch.setattr("socket.gethostname", lambda: "ab"[parallel.rank // 2])
    found, said = topology_of_hosts(parallel, [10, 8, 6], measured=True)
    seconds = re.fullmatch(
        r"links measured in ([\d.]+) s: .* GB/s within a host, .* GB/s between hosts, .* shared by a host's ranks",
        said,
    )
    assert seconds is not None and float(seconds[1]) < 30, said  # 2 on a machine that does nothing else
    assert [worker.node for worker in found.workers] == ["a", "b", "b"] and found.master_node == "a"
    assert found.capacities.tolist() == [10, 8, 6] and set(found.uplinks) == {"a", "b"}
    speeds = [*found.from_master(), *found.between_workers()[~np.eye(3, dtype=bool)]]
    speeds += [speed for link in found.uplinks.values() for speed in (link.up, link.down)]
    assert all(1e5 < speed < 1e12 for speed in speeds), speeds
    assert parallel.most(speeds) == speeds, "the same on every rank"
    assumed, said = topology_of_hosts(parallel, [10, 8, 6], measured=False)
    assert not said and assumed.from_master().tolist() == [50e9, 12.5e9, 12.5e9]
