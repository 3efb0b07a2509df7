"""What the plug-in decides before anything runs: the order of buckets and passes, costs, data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.pipeline import plugin
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.plugin import Bucket
from megatron_mux.pipeline.template import forward_only, most_in_flight, one_f_one_b, plain

HIDDEN = 64


@given(stages=st.integers(1, 6), count=st.integers(1, 20), length=st.integers(1, 4096))
def test_one_bucket_is_1f1b(stages: int, count: int, length: int) -> None:
    bucket = Bucket("all", count, length, 2)
    assert plugin._plan([bucket], stages, HIDDEN, None, False)[1] == one_f_one_b(stages, plain([count]))
    assert plugin._plan([bucket], stages, HIDDEN, None, True)[1] == forward_only(stages, count)


def test_buckets_enter_by_descending_latency_within_what_may_be_kept() -> None:
    buckets = [Bucket("short", 12, 16, 1), Bucket("long", 4, 64, 1), Bucket("wide", 4, 16, 3)]
    order, template = plugin._plan(buckets, 4, HIDDEN, None, False)
    assert [buckets[i].name for i in order] == ["long", "wide", "short"]
    assert most_in_flight(template) > 4, "short ones fit where 1F1B would keep long ones"
    _, tight = plugin._plan(buckets, 4, HIDDEN, (64.0,) * 4, False)
    long_first = [action.kind for action in tight[0]][:3]
    assert long_first == ["F", "B", "F"], "one long micro-batch at a time"


def test_costs_that_are_known_are_used() -> None:
    def cost(seconds: float, memory: tuple[float, ...] = ()) -> BucketCost:
        return BucketCost(2, (seconds,) * 2, (seconds,) * 2, memory=memory)

    slow, fast = Bucket("slow", 2, 8, 1, cost(3.0)), Bucket("fast", 2, 512, 1, cost(1.0))
    assert plugin._plan([fast, slow], 2, HIDDEN, None, False)[0] == [1, 0]
    with pytest.raises(ValueError, match="are not for 3 stage"):
        plugin._plan([fast, slow], 3, HIDDEN, None, False)
    with pytest.raises(ValueError, match="the cost of every bucket or of none"):
        plugin._plan([fast, Bucket("unknown", 2, 8, 1)], 2, HIDDEN, None, False)
    with pytest.raises(ValueError, match="bytes and tokens do not compare"):
        plugin._plan([fast, Bucket("kept", 2, 8, 1, cost(1.0, (1e6, 1e6)))], 2, HIDDEN, None, False)


@pytest.mark.parametrize("sizes", [(0, 8, 1), (1, 0, 1), (1, 8, 0)])
def test_an_empty_bucket_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="'empty' needs at least one"):
        Bucket("empty", *sizes)


def test_a_cost_of_other_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="must be of 3 uncut micro-batches"):
        Bucket("other", 3, 8, 1, BucketCost(2, (1.0,), (1.0,)))


def test_one_iterator_serves_all_buckets_in_the_order_in_which_they_were_bound() -> None:
    buckets = [Bucket("a", 2, 8, 1), Bucket("b", 3, 8, 1)]
    endless = iter(range(100))
    assert [list(own or ()) for own in plugin._batches(endless, buckets)] == [[0, 1], [2, 3, 4]]
    assert next(endless) == 5, "no more is read than the call needs"
    assert plugin._batches(None, buckets) == [None, None]
    own = [iter("ab"), iter("cde")]
    assert plugin._batches(own, buckets) == own
    assert plugin._batches(endless, buckets[:1]) == [endless], "read when it is due"
