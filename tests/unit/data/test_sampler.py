"""Sampling: every record once an epoch, and nothing but the step decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.data.sampler import Sampler, permutation

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**32 - 1)


@given(sizes, sizes, seeds, st.booleans(), st.integers(0, 3))
def test_an_epoch_has_every_record_once(
    records: int, batch: int, seed: int, shuffle: bool, epoch: int
) -> None:
    sampler = Sampler(records, batch, seed, shuffle)
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    batches = [sampler.batch(step) for step in steps]
    assert sorted(i for b in batches for i in b) == list(range(records))
    assert all(len(b) == batch for b in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch
    if not shuffle:
        assert [i for b in batches for i in b] == list(range(records))


@given(sizes, sizes, seeds, st.lists(st.integers(0, 200), max_size=10))
def test_a_batch_depends_on_the_step_alone(records: int, batch: int, seed: int, steps: list[int]) -> None:
    used = Sampler(records, batch, seed)
    for step in steps:
        assert used.batch(step) == Sampler(records, batch, seed).batch(step)


def test_epochs_and_seeds_differ_and_the_order_is_what_it_always_was() -> None:
    first = permutation(1000, 0, 0)
    assert (first != permutation(1000, 0, 1)).mean() > 0.9
    assert (first != permutation(1000, 1, 0)).mean() > 0.9
    # Runs are resumed after upgrades: these numbers must never change.
    assert permutation(10, 0, 0).tolist() == [6, 8, 0, 9, 3, 7, 2, 4, 5, 1]
    assert permutation(10, 42, 3).tolist() == [9, 0, 2, 4, 6, 8, 1, 7, 5, 3]


def test_each_epoch_has_an_order_of_its_own() -> None:
    sampler = Sampler(100, 100, 0)
    assert [sampler.batch(epoch) for epoch in range(3)] == [
        permutation(100, 0, epoch).tolist() for epoch in range(3)
    ]
    assert sampler.batch(0) != sampler.batch(1)


def test_places_are_evenly_drawn() -> None:
    where = np.stack([np.argsort(permutation(8, seed, epoch)) for seed in range(100) for epoch in range(10)])
    for record in range(8):
        counts = np.bincount(where[:, record], minlength=8)
        assert abs(counts - 125).max() < 50  # more than four standard deviations


@pytest.mark.parametrize(("records", "batch"), [(0, 1), (1, 0)])
def test_nothing_to_sample(records: int, batch: int) -> None:
    with pytest.raises(ValueError, match="a sampler needs"):
        Sampler(records, batch, 0)


def test_steps_count_from_zero() -> None:
    with pytest.raises(ValueError, match="count from 0"):
        Sampler(3, 1, 0).batch(-1)
