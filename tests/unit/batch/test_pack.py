"""Packing: every token keeps its task, position and label."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch, activate, active
from megatron_mux.kernels.attention.carry import Carry
from megatron_mux.kernels.attention.segments import Segment

lengths = st.lists(st.tuples(st.integers(0, 2), st.integers(2, 9)), min_size=1, max_size=8)


@given(lengths, st.integers(1, 4), st.randoms(use_true_random=False))
def test_pack_round_trips(items: list[tuple[int, int]], multiple: int, random: object) -> None:
    names = ("a", "b", "c")
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for i, (task, length) in enumerate(items):
        tokens = torch.randint(1, 100, (length,), generator=generator)
        labelled = torch.rand(length, generator=generator) > 0.5
        sequences.append(PackedSequence(names[task], i, tokens, labelled, 0.5))
    batch = pack(sequences, names, dict.fromkeys(names, 0), {"b": 3}, multiple).to()
    assert batch.rows % multiple == 0
    assert [s.task for s in batch.segments] == sorted(s.task for s in batch.segments)
    for segment in batch.segments:
        rows = slice(segment.start, segment.start + segment.length)
        _, _, tokens, _, _ = sequences[segment.sequence]
        assert torch.equal(batch.tokens[rows], tokens)
        shift = 3 if segment.task == "b" else 0
        assert batch.positions[rows].tolist() == [i + shift for i in range(segment.length)]
        assert batch.groups.token_index[rows].tolist() == list(range(segment.length))
        start, stop = batch.task_rows[segment.task]
        assert start <= segment.start and segment.start + segment.length <= stop
    expected = sum(int(s[3][1:].sum()) for s in sequences)
    assert batch.label_rows.shape == batch.labels.shape == batch.label_weights.shape == (expected,)
    assert torch.equal(batch.tokens[batch.label_rows + 1], batch.labels)
    for task, row in zip(batch.label_tasks, batch.label_rows, strict=True):
        assert names[task] == _task_of(batch, int(row))
    few = batch.labelled
    assert few.rows == expected < batch.rows
    assert torch.equal(few.tokens[few.label_rows], batch.tokens[batch.label_rows])
    assert torch.equal(few.groups.token_index, batch.groups.token_index[batch.label_rows])
    assert torch.equal(few.groups.sequence_ids, batch.groups.sequence_ids[batch.label_rows])
    assert list(few.task_rows) == list(batch.task_rows)
    for row, before in enumerate(batch.label_rows.tolist()):
        assert _task_of(few, row) == _task_of(batch, before)


def _task_of(batch: PackedBatch, row: int) -> str:
    return next(name for name, (start, stop) in batch.task_rows.items() if start <= row < stop)


@settings(deadline=None)
@given(lengths, st.integers(1, 4), st.integers(1, 5), st.data())
def test_chunks_hold_together_what_the_uncut_batch_holds(
    items: list[tuple[int, int]], chunk: int, multiple: int, data: st.DataObject
) -> None:
    names = ("a", "b", "c")
    generator = torch.Generator().manual_seed(1)
    sequences: list[PackedSequence] = []
    for i, (task, length) in enumerate(items):
        tokens = torch.randint(1, 100, (length,), generator=generator)
        sequences.append(
            PackedSequence(names[task], i, tokens, torch.rand(length, generator=generator) > 0.5, 1.0 + i)
        )
    steps, shifts = dict.fromkeys(names, 4), {"b": 3}
    wanted = _labels(pack(sequences, names, steps, shifts).to())
    carry = Carry()
    first = [data.draw(st.integers(0, 3)) for _ in sequences]  # the chunk in which each begins
    found: list[tuple[object, ...]] = []
    for clock in range(3 + 9):
        at = [(clock - begin) * chunk for begin in first]
        here = [i for i, s in enumerate(sequences) if 0 <= at[i] < s[2].shape[0]]
        spans = [(at[i], min(at[i] + chunk, sequences[i][2].shape[0])) for i in here]
        cut = [sequences[i] for i in here]
        batch = pack(cut, names, steps, shifts, multiple, spans=spans).to(carry=carry)
        assert batch.carry is carry and batch.rows % multiple == 0
        assert sorted(s.sequence for s in batch.segments) == here
        assert [s.task for s in batch.segments] == sorted(s.task for s in batch.segments)
        where = dict(zip(here, spans, strict=True))
        for segment in batch.segments:
            start, stop = where[segment.sequence]
            tokens = sequences[segment.sequence][2]
            assert (segment.past, segment.length) == (start, stop - start)
            assert segment.continues is (stop < tokens.shape[0])
            rows = slice(segment.start, segment.start + segment.length)
            shift = shifts.get(segment.task, 0)
            assert torch.equal(batch.tokens[rows], tokens[start:stop])
            assert batch.groups.token_index[rows].tolist() == list(range(start, stop))
            assert batch.positions[rows].tolist() == list(range(start + shift, stop + shift))
            assert batch.groups.sequence_ids[rows].tolist() == [segment.sequence] * segment.length
            assert (
                batch.task_rows[segment.task][0]
                <= rows.start
                <= rows.stop
                <= batch.task_rows[segment.task][1]
            )
        for name, (start, stop) in batch.labelled.task_rows.items():
            assert batch.label_tasks[start:stop].tolist() == [names.index(name)] * (stop - start)
        found += _labels(batch)
    assert sorted(found) == sorted(wanted)


def _labels(batch: PackedBatch) -> list[tuple[object, ...]]:
    """Of each labelled row: sequence, index of the token, its task, what to predict, with which weight."""
    rows = batch.label_rows
    return list(
        zip(
            batch.groups.sequence_ids[rows].tolist(),
            batch.groups.token_index[rows].tolist(),
            batch.label_tasks.tolist(),
            batch.labels.tolist(),
            batch.label_weights.tolist(),
            strict=True,
        )
    )


def test_a_label_across_a_cut_belongs_to_the_row_before_it() -> None:
    one = PackedSequence(
        "a", 5, torch.tensor([10, 11, 12, 13, 14]), torch.tensor([True, False, True, True, False]), 0.5
    )
    two = PackedSequence("b", 6, torch.tensor([20, 21, 22]), torch.tensor([False, True, True]), 0.25)
    early, late = (
        pack([one, two], ("a", "b"), {"a": 0, "b": 0}, {"b": 9}, spans=spans).to(carry=Carry())
        for spans in ([(0, 2), (0, 1)], [(2, 5), (1, 3)])
    )
    assert early.segments == (Segment("a", 0, 2, 5, 0, True, 5), Segment("b", 2, 1, 6, 0, True, 12))
    assert late.segments == (Segment("a", 0, 3, 5, 2, False, 5), Segment("b", 3, 2, 6, 1, False, 12))
    # Tokens 12 and 21 are the first of the later chunk, and to be predicted in the earlier one.
    assert (early.tokens.tolist(), late.tokens.tolist()) == ([10, 11, 20], [12, 13, 14, 21, 22])
    assert (early.label_rows.tolist(), early.labels.tolist()) == ([1, 2], [12, 21])
    assert (late.label_rows.tolist(), late.labels.tolist()) == ([0, 3], [13, 22])
    assert (early.label_weights.tolist(), early.label_tasks.tolist()) == ([0.5, 0.25], [0, 1])
    assert (early.labelled.task_rows, late.labelled.task_rows) == ({"a": (0, 1), "b": (1, 2)},) * 2
    assert (early.task_rows, late.task_rows) == ({"a": (0, 2), "b": (2, 3)}, {"a": (0, 3), "b": (3, 5)})
    assert (early.positions.tolist(), late.positions.tolist()) == ([0, 1, 9], [2, 3, 4, 10, 11])
    assert (early.groups.token_index.tolist(), late.groups.token_index.tolist()) == (
        [0, 1, 0],
        [2, 3, 4, 1, 2],
    )


def test_groups_say_whose_rows_are_whose() -> None:
    def sequence(task: str, number: int, length: int, labels: int) -> PackedSequence:
        return PackedSequence(task, number, torch.ones(length), torch.arange(length) >= length - labels, 1.0)

    sequences = [
        sequence("a", 7, 3, 2),
        sequence("b", 0, 100, 1),
        sequence("b", 1, 50, 0),
        sequence("c", 4, 2, 0),
    ]
    steps, slots = {"a": 5, "b": 6, "c": 7}, {"a": 9, "b": 0, "c": 2}
    batch = pack(sequences, ("c", "a", "b"), steps, multiple=4, training=False, slots=slots).to()
    groups = batch.groups
    assert (groups.slots, groups.rows, groups.steps) == ((2, 9, 0), ((0, 2), (2, 5), (5, 155)), (7, 5, 6))
    assert groups.row_ranges.tolist() == [[2, 0, 2, 7], [9, 2, 5, 5], [0, 5, 155, 6]] and not groups.training
    assert groups.tiles.tolist() == [[0, 0, 2], [1, 2, 5], [2, 5, 69], [2, 69, 133], [2, 133, 155]]
    assert groups.token_index.tolist() == [*range(2), *range(3), *range(100), *range(50), 0]
    assert groups.sequence_ids.tolist() == [4] * 2 + [7] * 3 + [0] * 100 + [1] * 50 + [0]
    few = batch.labelled.groups
    assert (few.slots, few.rows, few.steps) == ((9, 0), ((0, 2), (2, 3)), (5, 6))  # none of c's is a label
    assert few.row_ranges.tolist() == [[9, 0, 2, 5], [0, 2, 3, 6]] and few.tiles.tolist() == [
        [0, 0, 2],
        [1, 2, 3],
    ]
    assert few.token_index.tolist() == [0, 1, 98] and few.sequence_ids.tolist() == [7, 7, 0]


def test_the_device_gets_one_buffer_of_aligned_tensors() -> None:
    sequences = [PackedSequence("a", i, torch.ones(5), torch.ones(5).bool(), 1.0) for i in range(3)]
    batch = pack(sequences, ("a",), {"a": 0}, {"a": 2}, spans=[(0, 5), (2, 4), (1, 5)]).to()
    few, bounds = batch.labelled, batch.bounds
    assert bounds is not None and bounds.gather is not None
    own = [*_tensors(batch), *_tensors(few), bounds.queries, bounds.keys, bounds.gather]
    assert len({tensor.untyped_storage().data_ptr() for tensor in own}) == 1
    assert all((tensor.data_ptr() - own[0].data_ptr()) % 16 == 0 for tensor in own)
    # Prefix, past and own tokens of each segment; the rows of keys are the prefix, then pasts, then tokens.
    assert (bounds.queries.tolist(), bounds.keys.tolist()) == ([0, 5, 7, 11], [0, 7, 13, 20])
    assert (bounds.longest_query, bounds.longest_key) == (5, 7)
    assert bounds.gather.tolist() == [0, 1, *range(5, 10), 0, 1, 2, 3, 10, 11, 0, 1, 4, *range(12, 16)]


def _tensors(batch: PackedBatch) -> list[torch.Tensor]:
    own = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    return own + [value for value in vars(batch.groups).values() if isinstance(value, torch.Tensor)]


def test_a_batch_without_sequences_has_no_rows() -> None:
    batch = pack([], ("a",), {"a": 0}).to()
    assert batch.rows == batch.labelled.rows == 0 and batch.groups.rows == () == batch.segments


def test_active_is_set_inside_activate_only() -> None:
    batch = pack(
        [PackedSequence("a", 0, torch.tensor([1, 2]), torch.tensor([True, True]), 1.0)], ("a",), {"a": 0}
    ).to()
    with activate(batch):
        assert active() is batch
    with pytest.raises(RuntimeError, match="no micro-batch is active"):
        active()
