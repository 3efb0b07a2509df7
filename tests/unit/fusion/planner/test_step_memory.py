"""What steps take of memory, from tables: chunks as they are, equal parts of a step, single records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.footprint.content import ATTENTION, COUNTS
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import Group, PassTable
from megatron_mux.fusion.alignment import Slice
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.step_memory import Allowance, StepMemory, are_short
from megatron_mux.gpus import Gpu
from megatron_mux.kernels.attention.short import LONGEST, pairs_and_padding
from megatron_mux.memory.forms.method import ParallelConfig
from tests.unit.fusion import backbone

SHAPE = backbone.shape()
LABELS = len(COUNTS) + 1


def of_attention(load: TaskLoad, feature: str) -> StepMemory:
    """A CPU's memory that keeps a byte for each of a feature of attention, and nothing else."""
    return of_column(load, COUNTS.index(feature))


def of_column(load: TaskLoad, column: int) -> StepMemory:
    """The same of a feature by its place."""
    return StepMemory(tables_of([load.signature(SHAPE)], column), [load], SHAPE, "cpu")


def tables_of(signatures: Sequence[Signature], column: int) -> Memory:
    """Tables of that memory, for one signature."""
    memory = backbone.MadeUpTables().memory(Mesh(), "none", signatures)
    kept = np.zeros(len(COUNTS) + 2)
    kept[column] = 1.0
    table = PassTable(kept, np.zeros_like(kept), kept[None], np.zeros(1))
    (stage,) = memory.tables
    passes: dict[Group, PassTable] = {(0,): table}
    return Memory(memory.signatures, [replace(stage, passes=passes)], memory.layers, memory.chunk)


def pieces(load: TaskLoad) -> tuple[Slice, ...]:
    return tuple(Slice(load.name, i, 0, tokens) for i, tokens in enumerate(load.tokens))


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6))
def test_a_whole_step_is_one_part_of_it(lengths: list[int]) -> None:
    load = backbone.load("t", lengths)
    prefixed = replace(load, adapter=replace(load.adapter, virtual_tokens=3))
    for feature, task in [*((feature, load) for feature in ATTENTION), ("masked", prefixed)]:
        memory = of_attention(task, feature)
        exact, part = memory.of_chunks([pieces(load)]), memory.of_parts(np.ones((1, 1)), np.ones(1))
        assert part.kept == pytest.approx(exact.kept), feature


def test_parts_share_a_step_but_not_its_longest_record() -> None:
    load = backbone.load("t", [40] * 8)
    one, four, many = of_attention(load, "pairs").of_parts(np.ones((3, 1)), np.array([1.0, 4.0, 100.0])).kept
    assert one == 8 * pairs_and_padding([40])[0] == 4 * four
    assert many == one / 8, "a part has at least one record"
    labelled = of_column(load, LABELS).of_parts(np.ones((1, 1)), np.array([100.0])).kept
    assert labelled == pytest.approx(load.labels[0]), "and its labels"


def test_the_record_that_takes_most_need_not_be_the_longest() -> None:
    load = backbone.load("t", [LONGEST, LONGEST + 1])  # the longer one keeps no pairs
    memory = of_attention(load, "pairs")
    assert memory.records[0, 0, 0] == pairs_and_padding([LONGEST])[0]
    assert memory.longest([0])[0, 0] == 0
    pair = of_attention(replace(load, together=2), "padding")
    assert pair.records[0, 0, 0] == pairs_and_padding([LONGEST])[1]


def test_what_lasts_goes_by_the_values_that_are_trained() -> None:
    loads = [backbone.load("whole", [8], size=16), backbone.load("less", [8], size=12)]
    tables = backbone.MadeUpTables().memory(Mesh(), "none", [loads[0].signature(SHAPE)])
    two, one = (StepMemory(tables, own, SHAPE, "cpu").persistent for own in (loads, loads[:1]))
    more = StepMemory(tables, [loads[0], replace(loads[0], name="again")], SHAPE, "cpu").persistent
    assert two - one == pytest.approx((more - one) * 12 / 16)


def test_a_gpu_needs_more_than_its_tensors() -> None:
    load = backbone.load("t", [64])
    tables = backbone.MadeUpTables().memory(Mesh(), "none", [load.signature(SHAPE)])
    plain = StepMemory(tables, [load], SHAPE, "cuda")
    more = StepMemory(tables, [load], SHAPE, "cuda", Allowance.of("cuda", Gpu(), ParallelConfig()))
    assert more.overhead > 500 << 20 and plain.overhead == 0
    assert more.of_chunks([pieces(load)]).kept == pytest.approx(1.07 * plain.of_chunks([pieces(load)]).kept)
    assert more.persistent == pytest.approx(plain.persistent)
    assert Allowance.of("cpu", Gpu(), ParallelConfig()) == Allowance()
    alone, pair = (Allowance.of("cuda", Gpu(), ParallelConfig(pipeline=stages)).fixed for stages in (1, 2))
    assert alone > 512 << 20 and pair > alone


def test_short_is_what_a_cpus_attention_pads() -> None:
    load = backbone.load("t", [LONGEST])
    assert are_short([load]) and not are_short([load, replace(load, longest=LONGEST + 1)])
    prefixed = replace(load.adapter, virtual_tokens=3)
    assert not are_short([replace(load, adapter=prefixed)])
