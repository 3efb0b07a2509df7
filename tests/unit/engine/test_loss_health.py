"""A loss that has exploded is told from one that goes up and down."""

from __future__ import annotations

import random

import pytest

from megatron_mux.engine import LossHealth


def _course(losses: list[float]) -> list[bool]:
    health = LossHealth()
    found = []
    for loss in losses:
        health.note(loss)
        found.append(health.good)
    return found


def test_an_ordinary_course_is_good_throughout() -> None:
    chosen = random.Random(3)
    losses = [4 * 0.97**step * chosen.uniform(0.5, 1.5) + 0.05 for step in range(200)]
    assert all(_course(losses))
    assert LossHealth().good, "before the first step nothing is wrong"


def test_one_easy_batch_at_the_start_does_not_make_the_rest_bad() -> None:
    assert _course([0.1, 2.0, 2.1, 1.9, 2.0, 2.2, 2.0])[2:] == [True] * 5


@pytest.mark.parametrize("steps", [3, 8, 40])
def test_a_loss_that_explodes_is_not_good_however_long_it_stays_finite(steps: int) -> None:
    found = _course([2.0] * steps + [9.0, 30.0, 400.0] * 20)
    assert found == [True] * steps + [False] * 60 if steps >= 5 else found[steps] is False


def test_a_loss_that_creeps_away_is_not_good_in_the_end() -> None:
    assert not _course([2.0] * 10 + [2 * 1.05**step for step in range(60)])[-1]


def test_a_loss_that_comes_back_is_good_again() -> None:
    assert _course([2.0] * 6 + [20.0, 2.1])[-2:] == [False, True]


def test_a_negative_loss_that_falls_is_good_and_one_that_explodes_is_not() -> None:
    falling = [0.7 - 0.2 * step for step in range(50)]  # to -9.1, as robust DPO's
    assert _course([*falling, -8.0, 0.9, 1.1]) == [True] * 52 + [False]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_not_good(loss: float) -> None:
    assert _course([1.0, loss]) == [True, False]
