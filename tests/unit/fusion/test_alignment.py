"""Sharing sequences out loses none, spreads each task evenly and balances tokens."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.fusion.alignment import share_out

sequences = st.lists(st.tuples(st.integers(1, 256), st.integers(0, 3)), max_size=40)


@given(sequences, st.integers(1, 8))
def test_every_item_lands_in_one_part_and_groups_are_spread(items: list[tuple[int, int]], parts: int) -> None:
    lengths, groups = [i[0] for i in items], [i[1] for i in items]
    shares = share_out(range(len(items)), lengths, groups, parts)
    assert len(shares) == parts
    assert sorted(i for share in shares for i in share) == list(range(len(items)))
    for group in set(groups):
        most = math.ceil(groups.count(group) / parts)
        assert all(sum(groups[i] == group for i in share) <= most for share in shares)
    assert all(share == sorted(share) for share in shares)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=40), st.integers(1, 8))
def test_parts_differ_by_at_most_the_longest_item_when_counts_allow(lengths: list[int], parts: int) -> None:
    # With one item a group the count never binds, so the classical bound of longest-first holds.
    shares = share_out(range(len(lengths)), lengths, list(range(len(lengths))), parts)
    sums = [sum(lengths[i] for i in share) for share in shares]
    assert max(sums) - min(sums) <= max(lengths)
