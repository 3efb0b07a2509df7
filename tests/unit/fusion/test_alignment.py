"""The chunks hold every token once and sequences in order; parts are nearly even; padding is counted."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_mux.fusion.alignment import (
    Filled,
    Item,
    MicroBatchChunks,
    Slice,
    Weights,
    cut_into_chunks,
    padded_lengths,
    padding_shares,
    paper_chunk,
    share_out,
)

WEIGHTS = Weights(token=1.0, pair=0.01, label=2.0)

counts = st.integers(1, 4)
chunks = st.none() | st.integers(1, 24)


@st.composite
def batches(draw: st.DrawFn) -> list[Item]:
    """A step's sequences, task after task."""
    found = []
    for task in draw(st.permutations("abc")):
        for i, tokens in enumerate(draw(st.lists(st.integers(1, 60), max_size=6))):
            found.append(Item(task, i, tokens, WEIGHTS.of(tokens, draw(st.integers(0, tokens))), i))
    return found


def made(tasks: dict[str, list[int]]) -> list[Item]:
    """The sequences of these lengths."""
    return [
        Item(task, i, tokens, WEIGHTS.of(tokens, 0), i)
        for task, own in tasks.items()
        for i, tokens in enumerate(own)
    ]


def places(chunked: tuple[MicroBatchChunks, ...]) -> dict[tuple[str, int], list[tuple[int, int, Slice]]]:
    """For each sequence, where its slices lie: micro-batch, clock, slice."""
    found = defaultdict(list)
    for m, micro_batch in enumerate(chunked):
        for clock, chunk in enumerate(micro_batch):
            for part in chunk:
                found[part.task, part.sequence].append((m, clock, part))
    return found


@settings(deadline=None)
@given(batches(), counts, chunks, counts)
def test_all_pipelines_together_compute_every_token_once(
    items: list[Item], micro_batches: int, chunk: int | None, data: int
) -> None:
    seen: set[tuple[str, int]] = set()
    for rank in range(data):
        chunked = cut_into_chunks(items, chunk, Filled(data, micro_batches), rank)
        assert chunked == cut_into_chunks(items, chunk, Filled(data, micro_batches), rank), (
            "the same every time"
        )
        assert len(chunked) == micro_batches
        assert all(part for micro_batch in chunked for part in micro_batch), "no chunk is empty"
        found = places(chunked)
        assert not seen & set(found), "no sequence is on two pipelines"
        seen |= set(found)
        for item in items:
            parts = [part for _, _, part in found.get((item.task, item.sequence), [])]
            tokens = [token for part in parts for token in range(part.start, part.stop)]
            assert tokens == (list(range(item.tokens)) if parts else [])
    assert seen == {(item.task, item.sequence) for item in items}


@settings(deadline=None)
@given(batches(), counts, chunks)
def test_a_sequence_runs_through_its_clocks_without_a_gap(
    items: list[Item], micro_batches: int, chunk: int | None
) -> None:
    for parts in places(cut_into_chunks(items, chunk, Filled(1, micro_batches))).values():
        first = parts[0][1]
        assert len({m for m, _, _ in parts}) == 1, "it stays in one micro-batch"
        assert [clock for _, clock, _ in parts] == list(range(first, first + len(parts)))
        assert [part.start for _, _, part in parts] == [0, *(part.stop for _, _, part in parts[:-1])]
        for _, _, part in parts:
            assert 0 < part.tokens == part.stop - part.start
            assert chunk is None or part.tokens <= chunk


@settings(deadline=None)
@given(batches(), counts, st.integers(1, 24))
def test_a_task_that_fits_into_one_pack_never_exceeds_a_chunk(
    items: list[Item], micro_batches: int, chunk: int
) -> None:
    for micro_batch in cut_into_chunks(items, chunk, Filled(1, micro_batches)):
        total = Counter[str]()
        for clock in micro_batch:
            for part in clock:
                total[part.task] += part.tokens
        for clock in micro_batch:
            for task in {part.task for part in clock}:
                if total[task] <= len(micro_batch) * chunk:
                    assert sum(part.tokens for part in clock if part.task == task) <= chunk


@settings(deadline=None)
@given(batches(), counts, chunks)
def test_a_chunk_holds_its_tasks_in_order(items: list[Item], micro_batches: int, chunk: int | None) -> None:
    order = {name: i for i, name in enumerate(dict.fromkeys(item.task for item in items))}
    for micro_batch in cut_into_chunks(items, chunk, Filled(1, micro_batches)):
        for clock in micro_batch:
            rows = [(order[part.task], part.sequence) for part in clock]
            assert rows == sorted(set(rows)), "and of a sequence one slice"


def test_a_pack_fills_its_chunks_and_takes_no_other_task_in() -> None:
    # One pack of a (5 + 3 tokens), one of b (6); a's second sequence fills up the first one's last chunk.
    assert cut_into_chunks(made({"a": [5, 3], "b": [6]}), 4, Filled()) == (
        (
            (Slice("a", 0, 0, 4), Slice("b", 0, 0, 4)),
            (Slice("a", 0, 4, 5), Slice("a", 1, 0, 3), Slice("b", 0, 4, 6)),
        ),
    )


def test_packs_begin_where_clocks_come_out_even() -> None:
    # The longest needs three clocks, the last for one token: there goes b, and c to the first of the others.
    chunked = cut_into_chunks(made({"a": [9], "b": [4], "c": [3]}), 4, Filled())[0]
    assert [sum(part.tokens for part in clock) for clock in chunked] == [7, 4, 5]


def test_the_longest_sequences_are_packed_first() -> None:
    # 4 + 2 fill a pack of six; in the order in which they come, 2 + 2 would share one: clocks of 6 and 2.
    assert cut_into_chunks(made({"a": [2, 2, 4]}), 3, Filled()) == (
        (
            (Slice("a", 1, 0, 2), Slice("a", 2, 0, 3)),
            (Slice("a", 0, 0, 2), Slice("a", 2, 3, 4)),
        ),
    )


def test_micro_batches_are_not_cut_for_nothing() -> None:
    items = made({"a": [4, 4], "b": [2]})
    assert cut_into_chunks(items, 4, Filled()) == cut_into_chunks(items, None, Filled())
    assert cut_into_chunks([], 4, Filled(1, 3)) == ((), (), ())


@settings(deadline=None)
@given(batches(), st.integers(1, 8))
@example([], 3)
def test_parts_differ_by_at_most_the_dearest_item(items: list[Item], parts: int) -> None:
    costs = [item.cost for item in items]
    shares = share_out(items, costs, [0.0] * parts)
    assert len(shares) == parts
    assert sorted(map(id, items)) == sorted(id(item) for share in shares for item in share)
    assert all(share == [item for item in items if item in share] for share in shares), "in their order"
    sums = [sum(item.cost for item in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs, default=0.0) * (1 + 1e-9)
    # Longest first also: no part gets a second item while another has none.
    assert min(map(len, shares)) > 0 or max(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("costs", "sums"), [([1, 1, 2], [2, 2]), ([4, 2, 1, 1], [4, 4]), ([3, 3, 2, 2, 2], [7, 5])]
)
def test_the_dearest_goes_first_to_the_part_that_has_least(costs: list[float], sums: list[float]) -> None:
    shares = share_out(made({"a": [1] * len(costs)}), costs, [0.0, 0.0])
    assert [sum(costs[item.sequence] for item in share) for share in shares] == sums


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 60))
def test_what_a_sequence_costs(tokens: int, labels: int) -> None:
    pairs = sum(1 for at in range(tokens) for of in range(tokens) if of <= at)
    assert Weights(2.0, 0.5, 3.0).of(tokens, labels) == 2 * tokens + 0.5 * pairs + 3 * labels
    assert Weights().of(tokens, labels) == tokens


@pytest.mark.parametrize(
    ("max_lengths", "chunk"),
    [((64, 128, 256), 64), ((128, 256), 128), ((96,), 64), ((512,), 512), ((384, 512), 128), ((7, 64), 64)],
)
def test_the_papers_chunk_divides_all_lengths(max_lengths: tuple[int, ...], chunk: int) -> None:
    assert paper_chunk(max_lengths) == chunk


def test_to_what_sequences_are_padded() -> None:
    lengths = {"a": 64, "b": 256}
    assert padded_lengths("dense", lengths) == {}
    assert padded_lengths("max-length", lengths) == lengths
    assert padded_lengths("longest", lengths) == {"a": 256, "b": 256}
    assert padded_lengths("longest", {}) == {}


def test_padding_worked_by_hand() -> None:
    lengths = {"a": [2, 4], "b": [6, 8, 10]}
    # 30 tokens; to the longest of each task 2 x 4 + 3 x 10, to the longest of all 5 x 10.
    dense = {"plan": 0.0, "within_tasks": 8 / 38, "zero_padded": 20 / 50}
    assert padding_shares(lengths, {}) == pytest.approx(dense)
    assert padding_shares(lengths, {"a": 6, "b": 12}) == pytest.approx({**dense, "plan": 18 / 48})
    assert set(padding_shares({"a": []}, {}).values()) == {0.0} == set(padding_shares({}, {}).values())
