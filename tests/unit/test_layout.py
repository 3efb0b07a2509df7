"""Packing: every token keeps its task, position and label."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux import layout

lengths = st.lists(st.tuples(st.integers(0, 2), st.integers(2, 9)), min_size=1, max_size=8)


@given(lengths, st.integers(1, 4), st.randoms(use_true_random=False))
def test_pack_round_trips(items: list[tuple[int, int]], multiple: int, random: object) -> None:
    names = ("a", "b", "c")
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for i, (task, length) in enumerate(items):
        tokens = torch.randint(1, 100, (length,), generator=generator)
        labelled = torch.rand(length, generator=generator) > 0.5
        sequences.append((names[task], i, tokens, labelled, 0.5))
    batch = layout.pack(sequences, names, dict.fromkeys(names, 0), {"b": 3}, multiple)
    assert batch.rows % multiple == 0
    assert [s.task for s in batch.segments] == sorted(s.task for s in batch.segments)
    for segment in batch.segments:
        rows = slice(segment.start, segment.start + segment.length)
        _, _, tokens, _, _ = sequences[segment.sequence]
        assert torch.equal(batch.tokens[rows], tokens)
        shift = 3 if segment.task == "b" else 0
        assert batch.positions[rows].tolist() == [i + shift for i in range(segment.length)]
        assert batch.token_index[rows].tolist() == list(range(segment.length))
        start, stop = batch.task_rows[segment.task]
        assert start <= segment.start and segment.start + segment.length <= stop
    expected = sum(int(s[3][1:].sum()) for s in sequences)
    assert batch.label_rows.shape == batch.labels.shape == batch.label_weights.shape == (expected,)
    assert torch.equal(batch.tokens[batch.label_rows + 1], batch.labels)
    for task, row in zip(batch.label_tasks, batch.label_rows, strict=True):
        assert batch.task_names[task] == _task_of(batch, int(row))
    few = batch.labelled
    assert few.rows == expected < batch.rows
    assert torch.equal(few.tokens[few.label_rows], batch.tokens[batch.label_rows])
    assert torch.equal(few.token_index, batch.token_index[batch.label_rows])
    assert torch.equal(few.sequence_ids, batch.sequence_ids[batch.label_rows])
    assert list(few.task_rows) == list(batch.task_rows)
    for row, before in enumerate(batch.label_rows.tolist()):
        assert _task_of(few, row) == _task_of(batch, before)


def _task_of(batch: layout.MicroBatch, row: int) -> str:
    return next(name for name, (start, stop) in batch.task_rows.items() if start <= row < stop)


def test_active_is_set_inside_activate_only() -> None:
    batch = layout.pack([("a", 0, torch.tensor([1, 2]), torch.tensor([True, True]), 1.0)], ("a",), {"a": 0})
    with layout.activate(batch):
        assert layout.active() is batch
    with pytest.raises(RuntimeError, match="no micro-batch is active"):
        layout.active()
