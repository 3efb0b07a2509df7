"""Objects that live as long as the process are left out of collections while a run trains."""

from __future__ import annotations

import gc

from megatron_mux.training.garbage import freeze_objects, unfreeze_objects


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
