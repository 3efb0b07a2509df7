"""Which states of a task may follow which; what others are told of them."""

from __future__ import annotations

from typing import get_args

import pytest

from megatron_mux.tasks.life import State, TaskLife, TaskLives

STATES: tuple[State, ...] = get_args(State)
ENDS = ("finished", "failed", "refused", "removed", "stopped")


def test_a_life_goes_through_its_states() -> None:
    life = TaskLife()
    for state in ("waiting", "running", "parked", "running"):
        life.to(state)
        assert life.state == state and not life.is_over and life.status == "running"
        assert life.trains == (state != "waiting")
    life.to("failed", "its loss was nan")
    assert (life.state, life.reason, life.status, life.is_over) == (
        "failed",
        "its loss was nan",
        "failed",
        True,
    )


@pytest.mark.parametrize("before", STATES)
def test_nothing_follows_an_end_and_nothing_comes_before_a_beginning(before: State) -> None:
    for after in STATES:
        life = TaskLife(before)
        refused = before in ENDS or after in ("loading", "joining") or after == before
        refused = refused or (after == "parked" and before != "running")
        refused = refused or (after == "waiting" and before not in ("loading", "joining"))
        if refused:
            with pytest.raises(ValueError, match=f"is {before} cannot become {after}"):
                life.to(after)
            assert life.state == before
        else:
            life.to(after)
            assert life.state == after


def test_a_name_that_was_refused_begins_anew() -> None:
    lives = TaskLives()
    lives.begin("a", "joining").to("refused")
    assert lives.begin("a", "joining") is lives["a"] and lives["a"].state == "joining"


@pytest.mark.parametrize("before", STATES)
def test_a_life_ends_once(before: State) -> None:
    life = TaskLife(before)
    life.end("removed")
    assert life.state == (before if before in ENDS else "removed")
