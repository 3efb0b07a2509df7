"""A mixture's order is that of `datasets.interleave_datasets`."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset, interleave_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.data.mixture import Mixing

_PARTS = st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 5)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=25)
@given(_PARTS, st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_the_order_is_that_of_datasets(
    parts: list[tuple[int, float]], weighted: bool, everything: bool, seed: int
) -> None:
    sizes, weights = [size for size, _ in parts], tuple(weight for _, weight in parts)
    ends = np.cumsum(sizes)
    sets = [
        Dataset.from_dict({"i": list(range(end - size, end))}) for size, end in zip(sizes, ends, strict=True)
    ]
    mixing = Mixing(weights if weighted else None, everything, seed)
    shares = (np.array(weights) / sum(weights)).tolist() if weighted else None
    strategy: Any = "all_exhausted" if everything else "first_exhausted"
    theirs = interleave_datasets(sets, probabilities=shares, seed=seed, stopping_strategy=strategy)
    assert mixing.order(sizes).tolist() == list(theirs["i"])


def test_weights_are_shares() -> None:
    order = Mixing((3.0, 1.0), True, 1).order([10_000, 10_000])
    assert abs((order < 10_000).mean() - 0.75) < 0.02
    assert set(order) == set(range(20_000))
