"""Memory that was taken beforehand is there when it is needed."""

from __future__ import annotations

import pytest
import torch

from megatron_mux.engine.room import Room
from tests.budget import Budget


def test_what_it_has_it_gives_without_taking_any() -> None:
    with Budget(limit=1000) as budget:
        room = Room(torch.device("cpu"))
        room.take(1000)
        assert room.of(250, torch.float32).shape == (250,)
        assert room.of(3, torch.int64).nbytes == 24
        assert (budget.held, budget.failures) == (1000, 0)


def test_where_there_is_no_more_it_stays_as_it_was() -> None:
    with Budget(limit=1000):
        room = Room(torch.device("cpu"))
        room.take(600)
        with pytest.raises(torch.OutOfMemoryError):
            room.take(1001)
        assert room.size == 600
        with pytest.raises(torch.OutOfMemoryError):
            room.of(300, torch.float32)
        room.take(200)  # what is not needed any more is given back
        assert torch.zeros(800, dtype=torch.uint8).nbytes == 800


def test_scalars_find_room_in_it() -> None:
    with Budget(limit=1000) as budget:
        room = Room(torch.device("cpu"))
        room.take(1000)
        made = room.surely(lambda: torch.ones(4))
        assert made.tolist() == [1.0] * 4
        assert (budget.failures, room.size) == (2, 0)  # its own did not fit any more
        del made
        room.take(1000)
        assert room.surely(lambda: 3) == 3 and room.size == 1000
