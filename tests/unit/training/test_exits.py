"""When a run exits before its tasks are done."""

from __future__ import annotations

from megatron_mux.training.exits import Exits


def test_at_multiples_of_the_interval_counted_from_the_runs_beginning() -> None:
    exits = Exits(10, None, steps=7)
    assert list(exits.due(0.0)) == [(3, 10)]
    assert exits.reason_to_exit(0.0, is_training=True) == ""
    exits.after_steps(3)
    assert exits.reason_to_exit(0.0, is_training=True) == "after 10 steps (--exit-interval 10)"
    assert exits.reason_to_exit(0.0, is_training=False) == ""
    exits.after_steps(4)
    assert exits.reason_to_exit(0.0, is_training=True) == "" and list(exits.due(0.0)) == [(6, 10)]


def test_a_resumed_run_does_not_exit_where_it_left() -> None:
    exits = Exits(10, None, steps=10)
    assert exits.reason_to_exit(0.0, is_training=True) == "" and list(exits.due(1.0)) == [(10, 10)]


def test_at_the_first_step_that_ends_after_the_minutes() -> None:
    exits = Exits(None, 2)
    assert exits.reason_to_exit(90.0, is_training=True) == ""
    assert list(exits.due(0.0)) == []  # nothing is known before the first step
    assert [left for left, _ in exits.due(8.0)] == [4]
    assert exits.reason_to_exit(120.0, is_training=False) == "after 2 minutes (--exit-duration-in-mins)"
    assert [left for left, _ in exits.due(8.0)] == [1]
