"""Bytes from tables: linear arithmetic, depth, signatures that share, messages."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.footprint.content import ATTENTION, COUNTS, Array, Contents
from megatron_mux.footprint.memory import Memory, groups_of
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import LOSS, Group, PassTable, PersistentBytes, StageTable

FROZEN = 100.0
"""Bytes of a row that the frozen layers keep."""
OWN = (0.0, 7.0, 0.0, 30.0)
"""Bytes that each signature keeps of its own rows."""
INPUTS = ({"qkv": 5.0}, {"qkv": 5.0, "mlp": 3.0}, {"out": 11.0}, {"mlp": 3.0, "out": 11.0})
"""What each signature has all rows keep; the same name is kept once."""

SIGNATURES = [Signature(str(number), 0) for number in range(4)]


def line(group: Group, rows: Array, constant: float = 0.0) -> Array:
    """`[F]` of bytes of each row of a group's signatures."""
    found = np.zeros(len(COUNTS) + 2 * len(group))
    found[0] = constant
    found[len(COUNTS) : len(COUNTS) + len(group)] = rows
    return found


def row_bytes(group: Group) -> Array:
    """Bytes that each signature's rows keep in a group."""
    kept = {name: size for i in group for name, size in INPUTS[i].items()}
    return np.array([FROZEN + OWN[i] + sum(kept.values()) for i in group])


def stage_table(signatures: Sequence[Signature] = SIGNATURES) -> StageTable:
    """A table of signatures alone and together, for a stage of four layers."""
    count = len(signatures)
    passes = {}
    for group in groups_of(signatures):
        kept = line(group, 4 * row_bytes(group))
        moments = np.stack([kept + line(group, np.full(len(group), 50.0), 9.0), kept * 0.5])
        passes[group] = PassTable(kept, kept / 4, moments, np.array([1.0, 0.0]), (LOSS, "a pass"))
    tasks = np.arange(1.0, 1 + count)
    persistent = PersistentBytes(4000.0, 4 * tasks, 10 * tasks, 2 * tasks, tasks)
    return StageTable(
        4, persistent, PersistentBytes(1000.0, tasks, 0 * tasks, 0.5 * tasks, 0.25 * tasks), passes
    )


def contents(rows: list[list[float]]) -> Contents:
    """Micro-batches without labels."""
    zeros = np.zeros(len(rows))
    of_tasks = np.array(rows, np.float64)
    return Contents(of_tasks, 0 * of_tasks, zeros, zeros, np.zeros((len(rows), len(ATTENTION))))


@given(
    st.lists(st.lists(st.integers(0, 5000), min_size=4, max_size=4), min_size=1, max_size=5),
    st.integers(4, 90),
)
def test_signatures_that_meet_keep_what_all_would(rows: list[list[float]], layers: int) -> None:
    memory = Memory(SIGNATURES, [stage_table()], [layers], chunk=64)
    taken = memory.passes(contents(rows))
    for batch, own in enumerate(rows):
        group = tuple(i for i in range(4) if own[i])
        priced = group if len(group) == 1 else (0, 1, 2, 3)
        expected = layers * sum(own[i] * size for i, size in zip(priced, row_bytes(priced), strict=True))
        assert expected >= layers * row_bytes(group) @ [own[i] for i in group]
        assert taken.kept[batch, 0] == pytest.approx(expected)
        assert taken.working[batch, 0] == pytest.approx(50 * sum(own) + 9 if group else 0)


def test_moments_of_a_name_are_priced_by_the_largest_and_logits_are_told() -> None:
    width = len(COUNTS) + 2
    kept, loss, small, large = (np.zeros(width) for _ in range(4))
    kept[len(COUNTS)], small[len(COUNTS)], large[len(COUNTS)] = 10.0, 11.0, 14.0
    loss[len(COUNTS)], loss[COUNTS.index("labels of a chunk")] = 10.0, 2000.0
    table = PassTable(kept, kept, np.stack([small, loss, large]), np.ones(3), ("a pass", LOSS, "a pass"))
    one = contents([[100]])
    features = dataclasses.replace(one, labels=one.rows).features(chunk=64)
    assert table.named(features, 2) == {"a pass": (400.0, 0.0), LOSS: (64 * 2000.0, 64 * 2000.0)}
    assert table.at(features, 2)[1] == 64 * 2000.0


def test_weights_elsewhere_leave_those_in_use_and_hidden_states_at_both_ends() -> None:
    memory = Memory(SIGNATURES, [stage_table()] * 3, [4, 6, 4], chunk=64, message=8.0)
    one = contents([[10, 0, 0, 0]])
    before = memory.passes(one)
    for recomputed, first in ((False, 80.0), (True, 0.0)):
        after = memory.elsewhere(0.5, [100.0, 200.0, 300.0], recomputed)
        assert after.persistent_parts(np.zeros(4))["backbone"].tolist() == [2000.0, 3000.0, 2000.0]
        found = after.passes(one)
        assert (found.kept - before.kept)[0].tolist() == [first, 0.0, 80.0]
        assert (found.working - before.working)[0] == pytest.approx([180.0, 280.0, 380.0])


def test_what_lasts_is_counted_by_task_and_layer() -> None:
    memory = Memory(SIGNATURES, [stage_table(), stage_table()], [4, 6], chunk=64)
    counts = np.array([1.0, 0.0, 2.0, 0.0])
    assert memory.persistent(counts).tolist() == [4000 + 4 * 7, 6000 + 6 * 7]
    assert memory.updating(np.array([1.0, 0.0, 1.0, 0.0])).tolist() == [30, 30]
    summed = dataclasses.replace(memory, sums=1e6)
    assert (summed.persistent(counts) - memory.persistent(counts)).tolist() == [2 * 7, 3 * 7]
    many = 1e9 * counts
    assert (summed.persistent(many) - memory.persistent(many)).tolist() == [1e6, 1e6]


def test_messages_are_kept_by_the_stages_that_send_or_receive_them() -> None:
    tables = [stage_table()] * 3
    alone = Memory(SIGNATURES, tables, [4] * 3, 64).passes(contents([[10, 0, 0, 0]]), in_step=1)
    memory = Memory(SIGNATURES, tables, [4] * 3, 64, message=2.0, ranks=3)
    taken = memory.passes(contents([[10, 0, 0, 0]]), in_step=1)
    # The first has its output, the last its input, the middle both.
    assert (taken.kept - alone.kept).tolist() == [[20, 40, 20]]
    # A gradient each but on the last; the first has zeros to send where memory runs out.
    assert (taken.working - alone.working).tolist() == [[40, 20, 0]]
    more = memory.passes(contents([[10, 0, 0, 0]]), in_step=9).working - taken.working
    # One is received ahead, seven gradients are still being sent, and of eight outputs six are not in flight.
    assert more[0, 1] == (1 + 7 + 6) * 20


def test_messages_have_rows_of_references_too() -> None:
    alone, memory = (
        Memory(SIGNATURES, [stage_table()] * 2, [4] * 2, 64, message=m, ranks=2) for m in (0.0, 2.0)
    )
    both = contents([[10, 5, 0, 0]])
    for referring, rows in (((), 15), ((1,), 20), ((0, 1), 30)):
        found = dataclasses.replace(memory, referring=referring).passes(both, in_step=1)
        without = alone.passes(both, in_step=1)
        assert (found.kept - without.kept).tolist() == [[2 * rows] * 2]
        # A gradient in use, and zeros to send where memory runs out, on the first stage.
        assert (found.working - without.working).tolist() == [[2 * 2 * rows, 0]]


def test_logits_are_counted_up_to_a_chunk() -> None:
    one = contents([[100, 0, 0, 0]])
    labelled = dataclasses.replace(one, labels=one.rows)
    assert labelled.features(64)[0, COUNTS.index("labels of a chunk")] == 64
    assert labelled.features(640)[0, COUNTS.index("labels of a chunk")] == 100


def test_a_table_survives_a_file() -> None:
    table = stage_table()
    again = StageTable.of_json(json.loads(json.dumps(table.to_json())))
    one, other = (
        Memory(SIGNATURES, [own], [7], 64).passes(contents([[1, 2, 3, 4]])) for own in (table, again)
    )
    assert one.kept.tolist() == other.kept.tolist() and one.working.tolist() == other.working.tolist()


def test_tables_are_read_without_torch() -> None:
    code = "import sys, megatron_mux.footprint.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_rows_beside_a_higher_rank_of_their_family_take_what_it_takes() -> None:
    families = [Signature("a", 8), Signature("a", 64), Signature("b", 0), Signature("c", 0)]
    assert groups_of(families) == [(0,), (1,), (2,), (3,), (1, 2, 3)]
    memory = Memory(families, [stage_table(families)], [7], chunk=64)
    found = memory.passes(contents([[10, 20, 0, 0], [10, 20, 5, 0], [10, 0, 5, 0]]))
    wanted = memory.passes(contents([[0, 30, 0, 0], [0, 30, 5, 0], [0, 10, 5, 0]]))
    assert np.array_equal(found.kept, wanted.kept) and np.array_equal(found.working, wanted.working)
    alone = memory.passes(contents([[10, 0, 0, 0], [0, 10, 0, 0]])).kept
    assert alone[0] < alone[1]
