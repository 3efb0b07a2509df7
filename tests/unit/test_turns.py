"""How many steps a turn has."""

from __future__ import annotations

import pytest

from megatron_mux.pipeline.action import Action, TimedAction
from megatron_mux.pipeline.execute import Timer
from megatron_mux.turns import Turns


def taken(turns: Turns, count: int, due: int = 100, seconds: float = 1e-3) -> list[int]:
    """So many turns whose steps took so long."""

    def steps(most: int, timer: Timer | None) -> list[int]:
        if timer is not None:
            timer(TimedAction(Action(0, "F", 0), 0.0, 1.0, "a"))
        return list(range(most))

    found = []
    for _ in range(count):
        found.append(len(turns.take(steps, [due])))
        turns.seconds = seconds  # as the ranks agree
    return found


def test_the_first_turn_is_one_step_and_the_pictured_one_short() -> None:
    turns = Turns(rolling=True, watching=False)
    assert taken(turns, 4) == [1, 3, 16, 16]
    assert turns.pictured == (2, 4) and turns.steps == 36 and len(turns.timed) == 1


def test_without_rolling_a_turn_is_a_step() -> None:
    assert taken(Turns(rolling=False, watching=False), 4) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("seconds", "watching", "expected"),
    [
        (60.0, False, 4),
        (1.0, False, 10),
        (1e-6, False, 16),
        (60.0, True, 1),
        (0.5, True, 4),
        (1e-6, True, 16),
    ],
)
def test_slow_steps_still_roll_unless_somebody_may_wait_to_join(
    seconds: float, watching: bool, expected: int
) -> None:
    assert taken(Turns(rolling=True, watching=watching), 3, seconds=seconds)[-1] == expected


def test_a_turn_ends_where_something_is_due() -> None:
    assert taken(Turns(rolling=True, watching=False), 4, due=2) == [1, 2, 2, 2]
    assert taken(Turns(rolling=True, watching=False), 1, due=0) == [1]


def test_a_picture_is_drawn_once() -> None:
    turns = Turns(rolling=True, watching=False)
    drawn = []
    for _ in range(4):
        taken(turns, 1)
        drawn.append(turns.is_time_to_draw)
    assert drawn == [False, True, False, False]
