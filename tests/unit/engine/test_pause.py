"""Which tasks take part in steps, and which are thought of when others ask for room, while some are paused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_mux.engine import Engine
from megatron_mux.tasks.life import TaskLife


def made(**states: Any) -> Any:
    """An engine with tasks in these states, and nothing else."""
    engine: Any = object.__new__(Engine)
    engine._tasks = {name: SimpleNamespace(life=TaskLife(state), load=name) for name, state in states.items()}
    return engine


def test_a_paused_task_takes_no_part_and_one_that_was_parked_beside_it_goes_on() -> None:
    engine = made(a="running", b="running", c="parked")
    assert engine.active == ("a", "b")
    engine.pause("a")
    assert engine.active == ("b", "c") and engine.tasks == ("a", "b", "c")
    engine.pause("c")
    engine.pause("b")
    assert engine.active == ()
    engine.resume("c")
    assert engine.active == ("c",)


def test_tasks_that_are_registered_keep_their_place_in_memory() -> None:
    engine, asked = made(a="running", b="paused", c="parked", d="waiting", e="finished"), list[Any]()
    engine._load_of = lambda task: task.spec.name
    engine.planning = SimpleNamespace(planner=SimpleNamespace(check=asked.append))
    assert engine.has_room([SimpleNamespace(spec=SimpleNamespace(name="new"))])
    assert asked == [{name: name for name in ("a", "b", "c", "d", "new")}]
