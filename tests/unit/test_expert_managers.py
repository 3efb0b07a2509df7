"""A master and its managers, as the rest of the code asks about them, and what does not go with them."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megatron_mux.backbone.experts.layer import EXCHANGES
from megatron_mux.backbone.experts.master_exchange import ManagerExchange, MasterExchange
from megatron_mux.errors import UserError
from megatron_mux.expert_managers import ExpertManager, ManagedExperts, Master
from megatron_mux.expert_ranks import ExpertRanks, Feature

NOTHING: Any = None


def even(rank: int) -> ExpertRanks:
    return ExpertRanks(rank, 2, 0, 2, NOTHING, NOTHING, over_data=True)


def managed(rank: int) -> ManagedExperts:
    connected = dict.fromkeys(("headers", "forth", "back", "outbox"), NOTHING)
    return (ExpertManager if rank else Master)(rank, 3, 0, 1, NOTHING, NOTHING, over_data=True, **connected)


def test_a_master_has_the_rows_and_its_managers_the_experts() -> None:
    master, manager = managed(0), managed(2)
    assert (master.holds_rows, manager.holds_rows, even(1).holds_rows) == (True, False, True)
    assert [list(ranks.share([1, 2])) for ranks in (master, manager, even(1))] == [[1, 2], [], [1, 2]]
    assert (EXCHANGES[master.exchange], EXCHANGES[manager.exchange]) == (MasterExchange, ManagerExchange)
    assert (master.sizes, even(0).sizes) == ((1, 1, 2), (2, 2, 0))
    held = [[own.placement(4, [0]).held(0, rank) for rank in range(own.size)] for own in (master, even(0))]
    assert held == [[(), (0, 2), (1, 3)], [(0, 1), (2, 3)]]
    assert held[0][: master.first_worker] == [()] and even(0).first_worker == 0


@pytest.mark.parametrize("feature", get_args(Feature))
def test_what_does_not_go_with_managers_is_refused_with_them_alone(feature: Feature) -> None:
    even(0).refuse(feature, "NAME", "OTHER")
    with pytest.raises(UserError, match=r"(?s)NAME.*: ") as refused:
        managed(0).refuse(feature, "NAME", "OTHER")
    assert "expert-managers" in str(refused.value) or "expert managers" in str(refused.value)
