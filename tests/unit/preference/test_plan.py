"""Sequences of a record are in one micro-batch, whatever divides a step; the planner counts rows of references."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.data.sampler import Sampler
from megatron_mux.fusion.alignment import Slice
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.step import Lengths, step_chunks
from tests.unit.fusion import backbone
from tests.unit.fusion.planner.test_stage_cost import costs, step_memory


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    others=st.lists(st.integers(1, 40), max_size=7),
    micro_batches=st.integers(1, 5),
    data=st.integers(1, 3),
    chunk=st.sampled_from([None, 8]),
)
def test_pairs_stay_together(
    lengths: list[int], others: list[int], micro_batches: int, data: int, chunk: int | None
) -> None:
    pairs = tuple(length for own in lengths for length in (own, 41 - own))
    known = {"pairs": Lengths(pairs, pairs, together=2), "others": Lengths(tuple(others), tuple(others))}
    plan = Plan("spatial", 1, (Bucket((HybridTask(("pairs", "others")),), micro_batches, chunk),), data=data)
    places: dict[int, tuple[int, int]] = {}
    tokens = 0
    for rank in range(data):
        for chunk_id, chunks in step_chunks(plan, known, rank).chunks.items():
            for piece in chunks[0]:
                tokens += piece.tokens
                if piece.task == "pairs":
                    place = places.setdefault(piece.sequence // 2, (rank, chunk_id.micro_batch))
                    assert place == (rank, chunk_id.micro_batch)
    assert tokens == sum(pairs) + sum(others), "nothing is lost or computed twice"


@given(records=st.integers(1, 30), batch=st.integers(1, 7), shuffle=st.booleans())
def test_an_epoch_has_every_pair_once(records: int, batch: int, shuffle: bool) -> None:
    sampler = Sampler(2 * records, 2 * batch, 3, shuffle, together=2)
    steps = [sampler.batch(step) for step in range(sampler.steps_per_epoch)]
    assert sorted(i for own in steps for i in own) == list(range(2 * records))
    for own in steps:
        assert all(
            first % 2 == 0 and second == first + 1 for first, second in zip(own[::2], own[1::2], strict=True)
        )


def test_the_planner_counts_rows_of_references_forward_only() -> None:
    lengths = [40, 64, 64, 50]
    plain, bare = backbone.load("t", lengths), backbone.load("t", lengths, sites=())
    own = costs([plain]).hybrid((0,), 1)
    model = costs([replace(plain, refers=True, together=2)])
    found, again = model.hybrid((0,), 1), costs([bare]).hybrid((0,), 1)
    assert [a - b for a, b in zip(found.forward, own.forward, strict=True)] == pytest.approx(again.forward)
    assert found.backward == pytest.approx(own.backward), "they are not back-propagated"
    assert found.memory == pytest.approx(own.memory), "nothing of them is kept"
    slices = tuple(Slice("t", i, 0, n) for i, n in enumerate(lengths))
    assert model.chunks([slices])[0].forward == pytest.approx(found.forward)


def test_the_planner_counts_the_pass_of_a_kl_term() -> None:
    load = replace(backbone.load("t", [40, 64, 64, 50]), refers=True)
    model, plain = costs([replace(load, opening_passes=1)]), costs([load])
    found = model.step_overhead([[0]]) - plain.step_overhead([[0]])
    assert found == pytest.approx(sum(plain.hybrid((0,), 1).forward))
    rolling = PlanningContext(backbone.profile(), backbone.info(), Mesh(pipeline=2), rolling=8)
    assert rolling.with_tasks({"t": load}).steps_per_flush == 8
    assert rolling.with_tasks({"t": replace(load, opening_passes=1)}).steps_per_flush == 1


def test_a_pair_is_the_smallest_micro_batch() -> None:
    lengths = [64, 64, 64, 64]
    model = costs([replace(backbone.load("t", lengths), together=2)])
    assert model.hybrid((0,), 8).micro_batches == 2
    pair, one = (
        step_memory([replace(backbone.load("t", lengths), together=together)]).longest([0])
        for together in (2, 1)
    )
    assert (pair > one).all()
