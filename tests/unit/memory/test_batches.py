"""The largest batch, found without a trace for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_mux.memory.batches import Batches
from megatron_mux.memory.caching.replay import replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import predict, process_overhead
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.stream.events import Category, Moment, Stream, StreamBuilder
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.tracer import Tracer

CASE = Case({"model_type": "llama"}, 2, 1, 64, {"peft_type": "IA3"})


class Formula(Tracer):
    """A step by a formula, and how often it was asked for. One sequence does without a copy."""

    def __init__(self, jump: int | None = None) -> None:
        super().__init__()
        self.asked: list[int] = []
        self._jump = jump

    def step(self, case: Case) -> Stream:
        self.asked.append(case.batch)
        builder = StreamBuilder()
        builder.allocate(100 * MIB, Moment("load"), category=Category.PARAMETERS)
        for _ in range(2):
            live = [
                builder.allocate(size * case.batch * MIB // 3, Moment("forward", 0, "mm"))
                for size in (9, 15, 6, 33)
            ]
            if case.batch > 1:
                live.append(builder.allocate(case.batch * MIB, Moment("forward")))
            if self._jump is not None and case.batch >= self._jump:
                live.append(builder.allocate(50 * MIB, Moment("forward")))
            for block in live[::-2] + live[-2::-2]:
                builder.free(block, Moment("backward"))
        return builder.done()

    def steps(self, cases: Sequence[Case]) -> list[Stream]:
        return [self.step(case) for case in cases]


def _runs(batch: int, memory: int, jump: int | None) -> bool:
    case = replace(CASE, batch=batch)
    stream = predict(Formula(jump).step(case), case.gpu).stream
    return replay(stream, Settings(capacity=memory - process_overhead(0))).out_of_memory is None


@pytest.mark.parametrize("jump", [None, 40])
@pytest.mark.parametrize("memory", [600, 690, 707, 720, 745, 760, 1000, 1713, 3000])
def test_one_more_does_not_fit(memory: int, jump: int | None) -> None:
    found = Batches(CASE, Formula(jump)).largest(memory * MIB)
    assert not found or _runs(found, memory * MIB, jump)
    assert not _runs(found + 1, memory * MIB, jump)


def test_few_batches_are_traced() -> None:
    traces = Formula()
    batches = Batches(CASE, traces)
    assert batches.largest(3000 * MIB) > 50
    assert sorted(set(traces.asked)) == [2, 87, 258]
    thousand = Formula().step(replace(CASE, batch=1000))
    assert batches.prediction(1000).stream == predict(thousand, CASE.gpu).stream


def test_a_model_whose_weights_do_not_fit_is_not_traced() -> None:
    traces = Formula()
    assert Batches(CASE, traces, weights=700 * MIB).largest(600 * MIB) == 0 and not traces.asked
    assert Batches(CASE, Formula()).largest(300 * MIB) == 0


class Growing(Tracer):
    """Three blocks one after the other, each too large for what the last has left."""

    def step(self, case: Case) -> Stream:
        builder = StreamBuilder()
        builder.allocate(100 * MIB, Moment("load"), category=Category.PARAMETERS)
        for size in (30, 40, 50):
            builder.free(builder.allocate(size * case.batch * MIB, Moment("forward")), Moment("forward"))
        return builder.done()

    def steps(self, cases: Sequence[Case]) -> list[Stream]:
        return [self.step(case) for case in cases]


def test_what_fits_takes_no_more_than_there_is() -> None:
    """Blocks of 60, 80 and 100 MiB: where the next one finds no room, what is held of those before is returned."""
    batches = Batches(CASE, Growing())
    unlimited = batches.prediction(2)
    base = unlimited.process - 2 * 120 * MIB
    for spare, reserved in ((240, 240), (239, 140), (140, 140), (139, 100), (100, 100)):
        memory = base + spare * MIB
        assert unlimited.fits(memory)
        found = batches.within(2, memory)
        assert found.process == base + reserved * MIB == sum(found.breakdown.values()) <= memory
        assert found.peak_allocated == unlimited.peak_allocated
        assert found.peak_reserved_expandable == unlimited.peak_reserved_expandable
        kept = unlimited.process - found.process
        assert found.interval == tuple(size - kept for size in unlimited.interval), "of context alone"
    assert not unlimited.fits(base + 99 * MIB)
