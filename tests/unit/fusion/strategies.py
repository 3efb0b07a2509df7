"""Strategies that tests of plans share."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


@st.composite
def groupings(draw: st.DrawFn, names: Sequence[str]) -> list[list[list[str]]]:
    """Tasks in hybrid tasks in buckets: each task joins the last hybrid task or the last bucket, or opens a bucket."""
    buckets: list[list[list[str]]] = []
    for name in names:
        where = draw(st.sampled_from(["hybrid task", "bucket", "own"])) if buckets else "own"
        if where == "own":
            buckets.append([[name]])
        elif where == "bucket":
            buckets[-1].append([name])
        else:
            buckets[-1][-1].append(name)
    return buckets


def one_each(amounts: st.SearchStrategy[float], count: int) -> st.SearchStrategy[tuple[float, ...]]:
    """An amount for each of `count` stages, or of the gaps between them."""
    return st.lists(amounts, min_size=count, max_size=count).map(tuple)
