"""Which experts rows are assumed to select: all equally often, a row's far apart."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_mux.expert_shape import ExpertNames, Experts, Placement, Routing
from megatron_mux.memory.assumed_routes import ExpertLoad, assumed_experts

NAMES = ExpertNames("", "", "", "", "", "")


def _experts(count: int, top_k: int) -> Experts:
    return Experts(count, 16, 0, Routing(top_k), frozenset(), NAMES)


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1000, 8, 2), (777, 5, 2), (64, 16, 4), (50, 4, 4)])
def test_experts_are_selected_equally_often_and_once_by_a_row(rows: int, experts: int, top_k: int) -> None:
    found = assumed_experts(rows, experts, top_k)
    assert found.shape == (rows, top_k) and all(len(set(row)) == top_k for row in found.tolist())
    counts = np.bincount(found.ravel(), minlength=experts)
    assert abs(counts - rows * top_k / experts).max() <= 3


def test_loads_by_hand() -> None:
    one, other = ExpertLoad.of(_experts(8, 2), 2)
    assert one.sent == other.sent == one.received == other.received == 2, "each row goes to both ranks"
    assert one.pairs == pytest.approx(2, abs=0.01) and one.held == other.held == 4
    (alone,) = ExpertLoad.of(_experts(8, 2), tensor=2)
    assert (alone.sent, alone.received, alone.pairs, alone.held) == (2, 2, 4, 8)
    ranks = ((0,), (0,), (0,), (1,))
    first, second = ExpertLoad.of(_experts(4, 1), 2, placement=Placement(2, {0: ranks}))
    assert (first.held, second.held) == (3, 1) and first.sent == 1
    assert (first.received, second.pairs) == pytest.approx((1.5, 0.5), abs=0.01)
