"""When pieces and messages ran, as an exchange tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_mux.backbone.exchange import PendingResult
from megatron_mux.backbone.pieces import Message
from megatron_mux.engine.part_times import PartTimes
from megatron_mux.pipeline.action import Action, TimedAction, TimedPart

ACTION = Action.parse("0F0.0")
MESSAGE = Message("all_reduce", torch.zeros(1))


class Future:
    """Of a message that arrives when it is told to."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[object], None]] = []

    def get_future(self) -> Future:
        """Itself."""
        return self

    def then(self, callback: Callable[[object], None]) -> None:
        """To be called on arrival."""
        self.callbacks.append(callback)

    def arrive(self) -> None:
        """It is there."""
        for callback in self.callbacks:
            callback(self)


class NoFuture:
    """Gloo's reduce-scatter."""

    def get_future(self) -> Future:
        """There is none."""
        raise RuntimeError("Work::getFuture not implemented.")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The present, for tests to set."""
    present = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: present[0])
    return present


def run(now: list[float], works: list[Any]) -> list[TimedPart]:
    """Two batches in turns: pieces of 1 s; the first message arrives at 2.5, the other at 3.5 or when awaited, at 4."""
    times = PartTimes(torch.device("cpu"))
    own = times.of(ACTION, ["a", "b"])
    for index in (0, 1):
        own.begins(index)
        now[0] += 1.0
        own.ends(index)
        own.issued(index, MESSAGE, PendingResult(MESSAGE.tensor, works[index]))
    now[0] = 2.5
    works[0].arrive()
    own.begins(0)
    now[0] = 3.5
    own.ends(0)
    if isinstance(works[1], Future):
        works[1].arrive()
    now[0] = 4.0
    own.begins(1)
    now[0] = 5.0
    own.ends(1)
    told: list[TimedAction] = []
    timer = times.added(told.append)
    timer(TimedAction(ACTION, 0.0, 5.0, "a | b"))
    timer(TimedAction(Action.parse("0U0"), 5.0, 6.0, "a | b"))
    assert not told[1].parts
    return list(told[0].parts)


def test_pieces_and_messages_have_their_times(now: list[float]) -> None:
    parts = run(now, [Future(), Future()])
    assert parts == [
        TimedPart(0, 0, 0.0, 1.0, "a"),
        TimedPart(1, 0, 1.0, 2.0, "b"),
        TimedPart(0, 1, 2.5, 3.5, "a"),
        TimedPart(1, 1, 4.0, 5.0, "b"),
        TimedPart(0, 0, 1.0, 2.5, "a", "all_reduce"),
        TimedPart(1, 0, 2.5, 3.5, "b", "all_reduce"),  # issued at 2, behind the first
    ]


def test_a_message_that_does_not_tell_has_arrived_when_it_was_awaited(now: list[float]) -> None:
    message = run(now, [Future(), NoFuture()])[-1]
    assert message == TimedPart(1, 0, 2.5, 4.0, "b", "all_reduce")


def test_a_message_may_overtake_another(now: list[float]) -> None:
    times, works = PartTimes(torch.device("cpu")), (Future(), Future())
    own = times.of(ACTION, ["a", "b"])
    for index, work in enumerate(works):
        own.issued(index, MESSAGE, PendingResult(MESSAGE.tensor, work))
    for moment, work in ((1.0, works[1]), (3.0, works[0])):
        now[0] = moment
        work.arrive()
    assert [(part.batch, part.start, part.stop) for part in own.parts()] == [(1, 0.0, 1.0), (0, 1.0, 3.0)]


def test_a_pass_that_ran_out_of_memory_has_what_has_ended(now: list[float]) -> None:
    times = PartTimes(torch.device("cpu"))
    own = times.of(ACTION, ["a"])
    own.begins(0)
    own.ends(0)
    own.issued(0, MESSAGE, PendingResult(MESSAGE.tensor, Future()))
    assert own.parts() == (TimedPart(0, 0, 0.0, 0.0, "a"),)
