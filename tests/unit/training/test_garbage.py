"""Objects that live as long as the process are left out of collections while a run trains."""

from __future__ import annotations

import gc

import pytest

from megatron_mux.training.garbage import FrozenObjects, freeze_objects, unfreeze_objects


class Node:
    """An object in a cycle with itself."""

    def __init__(self, freed: list[str], name: str) -> None:
        self.itself, self.freed, self.name = self, freed, name

    def __del__(self) -> None:
        self.freed.append(self.name)


def test_frozen_objects_are_not_visited_until_the_run_ends() -> None:
    freed: list[str] = []
    before = Node(freed, "before")
    freeze_objects()
    try:
        assert gc.get_freeze_count() > 1000
        del before
        Node(freed, "after")
        gc.collect()
        assert freed == ["after"]
    finally:
        unfreeze_objects()
    gc.collect()
    assert freed == ["after", "before"] and gc.get_freeze_count() == 0


def test_a_run_freezes_once_and_undoes_it_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[None] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(None))
    monkeypatch.setattr(gc, "unfreeze", frozen.clear)
    callback = FrozenObjects()
    for is_last in (False, True):
        callback.after_first_steps(is_last)
        assert len(frozen) == 1
    callback.close()
    assert not frozen
