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
    found = assumed_experts(rows, experts, Routing(top_k))
    assert found.shape == (rows, top_k) and all(len(set(row)) == top_k for row in found.tolist())
    counts = np.bincount(found.ravel(), minlength=experts)
    assert abs(counts - rows * top_k / experts).max() <= 3


def test_likely_experts_are_selected_more_often() -> None:
    access = [1.0, 0.1, 0.5, 0.3, 0.1]
    found = assumed_experts(2000, 5, Routing(2), access)
    assert all(len(set(row)) == 2 for row in found.tolist())
    counts = np.bincount(found.ravel(), minlength=5)
    assert counts[0] == 2000 and abs(counts - 2000 * np.array(access)).max() <= 4


def test_experts_come_from_as_many_groups_as_a_router_may_choose() -> None:
    found = assumed_experts(4000, 16, Routing(4, groups=4, top_groups=2))
    assert all(len(set(row)) == 4 and len({e // 4 for e in row}) == 2 for row in found.tolist())
    counts = np.bincount(found.ravel(), minlength=16)
    assert abs(counts / 1000 - 1).max() < 0.05


def test_loads_by_hand() -> None:
    one, other = ExpertLoad.of(_experts(8, 2), 0, 2)
    assert one.sent == other.sent == one.received == other.received == 2, "each row goes to both ranks"
    assert one.pairs == pytest.approx(2, abs=0.01)
    (alone,) = ExpertLoad.of(_experts(8, 2), 0, tensor=2)
    assert (alone.sent, alone.received, alone.pairs) == (2, 2, 4)
    ranks = ((0,), (0,), (0,), (1,))
    first, second = ExpertLoad.of(_experts(4, 1), 7, 2, placement=Placement(2, {7: ranks}))
    assert first.sent == 1 and (first.received, second.pairs) == pytest.approx((1.5, 0.5), abs=0.01)
    assert ExpertLoad.most([first, second]).received == first.received
    skewed = ExpertLoad.of(_experts(4, 1), 7, 2, access={7: [0.1, 0.1, 0.1, 0.7]})
    assert [load.pairs for load in skewed] == pytest.approx([0.4, 1.6], abs=0.01), "two neighbours on each"


def test_each_source_uses_the_replica_that_is_near() -> None:
    everywhere = Placement(2, {0: ((0, 1), (0, 1))})
    for load in ExpertLoad.of(_experts(2, 2), 0, 2, placement=everywhere):
        assert (load.sent, load.received, load.pairs) == (1, 1, 2), "no row leaves its rank"
