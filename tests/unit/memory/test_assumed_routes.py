"""Which experts rows are assumed to select: all equally often, a row's far apart."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_mux.expert_shape import Routing
from megatron_mux.memory.assumed_routes import assumed_experts


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
