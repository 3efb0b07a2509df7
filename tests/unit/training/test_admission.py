"""Who trains now and who waits: first come first served, within the room there is, and everybody in the end."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.errors import UserError
from megatron_mux.training.admission import Admission, first_tasks

ROOM = 10


class Engine:
    """Has room for tasks whose sizes sum up to `ROOM`."""

    def __init__(self) -> None:
        self.training: dict[str, int] = {}
        self.asked = 0

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(self.training)

    def has_room(self, tasks: list[Any]) -> bool:
        self.asked += 1
        new = sum(int(task.size) for task in tasks)
        return sum(self.training.values()) + new <= ROOM

    def take(self, tasks: list[Any]) -> list[str]:
        self.training.update({task.spec.name: task.size for task in tasks})
        return [task.spec.name for task in tasks]


def task(name: str, size: int) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(name=name), size=size)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def admission(engine: Engine) -> Admission:
    return Admission(engine, SimpleNamespace(world_size=1))  # type: ignore[arg-type]


def test_nobody_overtakes(engine: Engine, admission: Admission) -> None:
    assert engine.take(admission.offer([task("a", 6), task("b", 6), task("c", 2)])) == ["a"]
    assert engine.take(admission.offer([task("d", 1)])) == []
    assert [waiting.spec.name for waiting in admission.waiting] == ["b", "c", "d"]
    del engine.training["a"]
    assert engine.take(admission.next()) == ["b", "c", "d"]
    assert not admission.waiting


def test_who_withdraws_holds_nobody_up(engine: Engine, admission: Admission) -> None:
    engine.take(admission.offer([task("a", 6), task("b", 6), task("c", 2)]))
    assert admission.withdraw("b") and not admission.withdraw("b")
    assert engine.take(admission.next()) == ["c"]
    assert engine.take(admission.offer([task("d", 2)])) == ["d"], "though nobody has left since"


def test_who_fills_all_room_trains_alone(engine: Engine, admission: Admission) -> None:
    engine.take(admission.offer([task("a", 1), task("large", ROOM + 5)]))
    del engine.training["a"]
    assert engine.take(admission.next()) == ["large"], "alone; what cannot be trained was refused before"


@settings(deadline=None)
@given(st.lists(st.integers(1, ROOM), max_size=200), st.randoms(use_true_random=False))
def test_everybody_trains_in_the_end_and_never_beyond_the_room(sizes: list[int], random: Any) -> None:
    engine = Engine()
    admission = Admission(engine, SimpleNamespace(world_size=1))  # type: ignore[arg-type]
    coming = [task(str(i), size) for i, size in enumerate(sizes)]
    order: list[str] = []
    while coming or engine.training or admission.waiting:
        if coming and random.random() < 0.5:
            count = random.randint(1, 4)
            order += engine.take(admission.offer(coming[:count]))
            coming = coming[count:]
        elif engine.training:
            del engine.training[random.choice(list(engine.training))]
        order += engine.take(admission.next())
        assert sum(engine.training.values()) <= ROOM
    assert order == [str(i) for i in range(len(sizes))]


class Planner:
    """Knows what each load needs."""

    def check(self, loads: Mapping[str, int]) -> None:
        if sum(loads.values()) > ROOM:
            raise UserError(*(f"task {name!r} is too large" for name in loads))


def test_the_first_tasks_are_those_that_will_be_taken_in() -> None:
    taken = first_tasks(Planner(), {"a": 4, "b": 5, "c": 9, "d": 1})  # type: ignore[arg-type, dict-item]
    assert list(taken) == ["a", "b"]
    with pytest.raises(UserError) as raised:
        first_tasks(Planner(), {"a": 11, "b": 5, "c": 12})  # type: ignore[arg-type, dict-item]
    assert raised.value.problems == ["task 'a' is too large", "task 'c' is too large"]
