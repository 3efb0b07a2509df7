"""How many steps a burst has."""

from __future__ import annotations

import pytest

from megatron_mux.pipeline.action import Action, TimedAction
from megatron_mux.pipeline.execute import Timer
from megatron_mux.training.step_loop import StepLoop


def taken(step_loop: StepLoop, count: int, due: int = 100, seconds: float = 1e-3) -> list[int]:
    """So many step_loop whose steps took so long."""

    def steps(most: int, timer: Timer | None) -> list[int]:
        if timer is not None:
            timer(TimedAction(Action(0, "F", 0), 0.0, 1.0, "a"))
        return list(range(most))

    found = []
    for _ in range(count):
        found.append(len(step_loop.run_burst(steps, [due])))
        step_loop.seconds = seconds  # as the ranks agree
    return found


def test_the_first_burst_is_one_step_and_the_second_timed_one_short() -> None:
    step_loop = StepLoop(rolling=True, watching=False)
    assert taken(step_loop, 4) == [1, 3, 16, 16]
    assert step_loop.timed_steps == (2, 4) and step_loop.steps == 36 and len(step_loop.timed) == 1


def test_without_rolling_a_burst_is_a_step() -> None:
    assert taken(StepLoop(rolling=False, watching=False), 4) == [1, 1, 1, 1]


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
    assert taken(StepLoop(rolling=True, watching=watching), 3, seconds=seconds)[-1] == expected


def test_a_burst_ends_where_something_is_due() -> None:
    assert taken(StepLoop(rolling=True, watching=False), 4, due=2) == [1, 2, 2, 2]
    assert taken(StepLoop(rolling=True, watching=False), 1, due=0) == [1]


def test_a_picture_is_drawn_once() -> None:
    step_loop = StepLoop(rolling=True, watching=False)
    drawn = []
    for _ in range(4):
        taken(step_loop, 1)
        drawn.append(step_loop.is_time_to_draw)
    assert drawn == [False, True, False, False]


def test_the_burst_after_the_next_is_known_before() -> None:
    """As long as steps take as long as before; a save is due every 20 steps and an evaluation every 7."""
    step_loop = StepLoop(rolling=True, watching=False)
    told, found = [], []
    for _ in range(8):
        due = [(interval - step_loop.steps % interval, interval) for interval in (20, 7)]
        told.append(step_loop.next_max_steps(due))
        found.append(len(step_loop.run_burst(lambda most, timer: [0] * most, [left for left, _ in due])))
        step_loop.seconds = 0.5
    assert found == [1, 3, 3, 7, 6, 1, 7, 7]
    assert told[:-1] == found[1:]
    assert StepLoop(rolling=False, watching=False).next_max_steps([(20, 20)]) == 1
