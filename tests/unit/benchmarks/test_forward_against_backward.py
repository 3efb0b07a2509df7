"""The simulation of pairs of a forward and a backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_mux.pipeline.bucket import BucketCost, sizes_of
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.template import one_f_one_b

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_without_pairs_it_is_the_pipelines_simulation() -> None:
    from forward_against_backward import Unit, latency, order

    cost = BucketCost(6, (1.0, 1.5, 1.2), (2.0, 1.7, 2.5), transfer=(0.3, 0.2))
    unit = Unit(cost.forward, cost.backward, ((0.0, 0.0),) * 3, cost.transfer)
    found = latency(unit, [list(order([0] * 6, lead, paired=False)) for lead in (3, 2, 1)])
    assert found == pytest.approx(simulate(one_f_one_b(3, sizes_of([cost])), [cost]).latency)


def test_results_of_a_pair_leave_when_their_own_pass_is_done() -> None:
    from forward_against_backward import Unit, latency, order

    def seconds(forward_done: float) -> Any:
        unit = Unit((2.0, 2.0), (4.0, 4.0), ((forward_done, 5.0),) * 2, (0.0,))
        return latency(unit, [list(order([0] * 3, lead, paired=True)) for lead in (2, 1)])

    # Stage 0: F0 F1, wait, F2 with B0, B1, B2; stage 1: F0, F1 with B0, F2 with B1, B2.
    assert seconds(3.0) == pytest.approx(2 + 2 + 5 + 3 + 5 + 4 + 4)
    assert seconds(5.0) == pytest.approx(seconds(3.0) + 2.0)
