"""Tables are solved from what passes hold at a few sizes."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_mux.estimate.rehearsal import DEEP, SHALLOW
from megatron_mux.estimate.solve import _Lines, _pass_table, stage_table
from megatron_mux.footprint.content import ATTENTION, COUNTS, Contents
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.table import Group
from tests.unit.estimate.played import (
    ADAPTER,
    CHUNK,
    COPIED,
    MANY,
    MOMENTS,
    ONCE,
    SIGNATURES,
    WEIGHTS,
    RowBytes,
    played,
)

GROUPS: list[Group] = [(0,), (1,), (0, 1)]


def solved(kept: RowBytes, layers: int = 30, scratch: int = 0, chunks: bool = True) -> Memory:
    """A deep stage's memory, from passes of two and three layers."""
    shallow, deep = (played(GROUPS, depth, kept, scratch, chunks) for depth in (SHALLOW, DEEP))
    return Memory(SIGNATURES, [stage_table(shallow, deep, (SHALLOW, DEEP), CHUNK)], [layers], CHUNK)


@pytest.mark.parametrize("chunks", [True, False])
def test_deep_stages_at_other_sizes_follow_from_few_layers(chunks: bool) -> None:
    memory = solved(lambda rows: int(8 * rows) + 40, chunks=chunks)
    rows = np.array([[100_000.0, 0.0], [7.0, 3000.0]])
    copied = np.array([0.0, 5000.0 * chunks])
    taken = memory.passes(Contents(rows, rows / 2, np.ones(2), copied, np.zeros((2, len(ATTENTION)))))
    total = rows.sum(axis=1)
    assert taken.kept[:, 0] == pytest.approx(30 * (8 * total + COPIED * copied + 40) + 64, abs=8)
    assert taken.working[:, 0] == pytest.approx(total, abs=8)
    lasts = memory.persistent(np.array([2.0, 1.0]))[0]
    assert lasts == pytest.approx(2 * ONCE + 30 * (WEIGHTS + 3 * (ADAPTER + MOMENTS)))
    # In the first step moments are allocated, too; they count as lasting.
    assert memory.updating(np.array([1.0, 0.0]))[0] == pytest.approx(300)


def test_scratch_of_many_rows_is_never_missed_and_not_taken_for_kept() -> None:
    def kept(rows: int) -> int:
        return 4000 * rows

    rows = np.array([[9000.0, 0.0]])
    contents = Contents(rows, rows, np.ones(1), np.zeros(1), np.zeros((1, len(ATTENTION))))
    plain, found = (solved(kept, scratch=scratch).passes(contents) for scratch in (0, 500_000))
    assert plain.kept[0, 0] == pytest.approx(found.kept[0, 0], rel=1e-6)
    assert plain.working[0, 0] < 500_000 <= found.working[0, 0] * (1 + 1e-6)


def test_scratch_in_steps_of_rows_is_never_missed() -> None:
    exact = solved(lambda rows: 4000 * rows)
    stepped = solved(lambda rows: 4000 * rows + 4096 * int(rows > MANY))
    rows = np.array([[9000.0, 0.0]])
    contents = Contents(rows, rows, np.ones(1), np.zeros(1), np.zeros((1, len(ATTENTION))))
    least, most = (
        float((own.passes(contents).kept + own.passes(contents).working)[0, 0]) for own in (exact, stepped)
    )
    assert least <= most <= 1.01 * least


def test_what_lasts_does_not_need_every_signature_of_a_pair_alone() -> None:
    whole, part = (
        stage_table(own, own, (DEEP, DEEP), CHUNK)
        for own in (played(groups, DEEP, lambda rows: 2 * rows) for groups in (GROUPS, [(1,), (0, 1)]))
    )
    assert part.persistent.backbone == whole.persistent.backbone == 2 * ONCE + WEIGHTS * DEEP
    assert part.persistent.tasks[1] == whole.persistent.tasks[1] == (ADAPTER + MOMENTS) * DEEP


@pytest.mark.parametrize("feature", ["pairs", "long"])
def test_moments_that_a_cpus_attention_makes_largest_are_kept(feature: str) -> None:
    by_rows, by_attention = (np.zeros(len(COUNTS) + 2) for _ in range(2))
    by_rows[len(COUNTS)] = 10.0  # of most micro-batches the largest
    by_attention[COUNTS.index(feature)] = {"pairs": 0.1, "long": 11.0}[feature]
    forward, backward = (
        _Lines(line[None], np.zeros(1), np.zeros_like(line), np.zeros_like(line), ["a pass"])
        for line in (by_rows, by_attention)
    )
    assert len(_pass_table(forward, backward, np.zeros_like(by_rows), CHUNK).moments) == 2
