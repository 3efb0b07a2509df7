"""Which states of a task may follow which; what others are told of them."""

from __future__ import annotations

from typing import cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.tasks.life import State, StateChange, TaskLife, TaskLives

STATES: tuple[State, ...] = get_args(State)
ENDS = ("finished", "failed", "refused", "removed", "stopped")


def test_a_life_goes_through_its_states() -> None:
    life = TaskLife()
    states: tuple[State, ...] = (
        "waiting", "running", "parked", "running", "paused", "running", "parked", "paused", "waiting", "paused",
    )  # fmt: skip
    for state in states:
        life.to(state)
        assert life.state == state and not life.is_over and life.status == "running"
        assert life.trains == (state in ("running", "parked"))
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
        refused = refused or (after == "waiting" and before not in ("loading", "joining", "paused", "pruned"))
        refused = refused or (after == "paused" and before not in ("waiting", "running", "parked"))
        refused = refused or (after == "pruned" and before == "joining")
        assert life.can_become(after) != refused
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


@given(st.lists(st.sampled_from(STATES)), st.sampled_from(["loading", "joining"]))
def test_every_change_is_told_in_order_and_whatever_happens_a_task_can_end(
    wanted: list[State], first: State
) -> None:
    lives = TaskLives()
    life, expected = lives.begin("a", first), [StateChange("a", None, first, "")]
    for state in wanted:
        before = life.state
        if life.can_become(state):
            life.to(state, f"because of {state}")
            expected.append(StateChange("a", before, state, f"because of {state}"))
        else:
            with pytest.raises(ValueError, match="cannot become"):
                life.to(state)
            assert life.state == before
    assert lives.changes == expected
    assert life.is_over == (life.state in ENDS)
    assert life.is_over or all(life.can_become(end) for end in cast("tuple[State, ...]", ENDS))


def test_a_save_says_what_was_saved_before_until_the_task_has_begun() -> None:
    life = TaskLife("joining")
    assert life.saved_status("finished") == "finished", "it is to run longer, and has not begun to"
    life.to("waiting")
    assert life.saved_status("paused") == "paused"
    said, states = [], ("running", "paused", "waiting", "running", "parked")
    for state in cast("tuple[State, ...]", states):
        life.to(state)
        said.append(life.saved_status("finished"))
    assert said == ["running", "paused", "running", "running", "running"]
    withdrawn = TaskLife("waiting")
    for one in (life, withdrawn):
        one.end("removed")
    assert (life.saved_status("running"), withdrawn.saved_status("running")) == ("removed", "running")
