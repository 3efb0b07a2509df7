"""Sequences of a record are in one micro-batch, whatever divides a step; the planner counts rows of references."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.data.sampler import Sampler
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan
from megatron_mux.fusion.step import Lengths, step_grid


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
        for unit, chunks in step_grid(plan, known, rank).chunks.items():
            for piece in chunks[0]:
                tokens += piece.tokens
                if piece.task == "pairs":
                    place = places.setdefault(piece.sequence // 2, (rank, unit.micro_batch))
                    assert place == (rank, unit.micro_batch)
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
