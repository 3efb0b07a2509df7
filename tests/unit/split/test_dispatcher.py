"""Work is computed one batch at a time, in the order in which it gets memory, and its memory is given back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from megatron_mux.split.server.dispatcher import Dispatcher, Outcome, Work
from megatron_mux.split.server.scheduler import Scheduler


class Bench:
    """A dispatcher whose compute thread waits until the test lets it go on."""

    def __init__(self, capacity: int = 10, together: int = 0) -> None:
        self.dispatcher = Dispatcher(Scheduler(capacity), together)
        self.go = threading.Semaphore(0)
        self.computed: list[list[str]] = []

    def run(self, works: Sequence[Work]) -> list[str]:
        assert self.go.acquire(timeout=20)
        self.computed.append([work.payload for work in works])
        return [f"{work.payload}!" for work in works]

    def work(self, name: str, size: int = 4, **others: Any) -> Work:
        return Work("client", self.run, name, size, **others)

    def begin(self, name: str, size: int = 4, **others: Any) -> asyncio.Task[Outcome]:
        return asyncio.ensure_future(self.dispatcher.compute(self.work(name, size, **others)))


def bench(**options: Any) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Run a test in an event loop; at its end, all memory must be free."""

    def decorate(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def run() -> None:
            own = Bench(**options)
            await test(own)
            assert own.dispatcher.scheduler.free == own.dispatcher.scheduler.capacity
            assert not own.dispatcher.queued
            own.dispatcher.close()

        def wrapped() -> None:
            asyncio.run(run())

        return wrapped

    return decorate


def test_time_is_that_of_the_device_not_of_its_launches() -> None:
    """On a GPU `run` returns before anything is computed."""
    steps: list[str] = []

    def run(works: Sequence[Work]) -> list[str]:
        steps.append("launched")
        return ["result" for _ in works]

    def finish() -> None:
        time.sleep(0.05)
        steps.append("computed")

    async def computed() -> Outcome:
        dispatcher = Dispatcher(Scheduler(10), synchronize=finish)
        outcome = await dispatcher.compute(Work("client", run, "one", 4))
        dispatcher.close()
        return outcome

    assert asyncio.run(computed()).computed_s >= 0.05 and steps == ["launched", "computed"]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@bench()
async def _in_order(own: Bench) -> None:
    tasks = [own.begin(name) for name in "abc"]  # two fit
    await settle()
    assert own.dispatcher.is_short
    own.go.release(3)
    outcomes = await asyncio.gather(*tasks)
    assert own.computed == [["a"], ["b"], ["c"]]
    assert [one.result for one in outcomes] == ["a!", "b!", "c!"]


@bench(together=100)
async def _together(own: Bench) -> None:
    kinds = [("a", "x", 60), ("b", "x", 30), ("c", "y", 10), ("d", "x", 30), ("e", "x", 10)]
    tasks = [own.begin("first", 1)]
    await settle()
    tasks += [own.begin(name, 1, joins=joins, tokens=tokens) for name, joins, tokens in kinds]
    await settle()
    own.go.release(10)
    outcomes = await asyncio.gather(*tasks)
    assert own.computed == [["first"], ["a", "b", "e"], ["c"], ["d"]]
    assert [one.together for one in outcomes] == [1, 3, 3, 1, 1, 3]


@bench()
async def _kept(own: Bench) -> None:
    first = own.begin("a", 8, keeps=7)
    await settle()
    second = own.begin("b", 4)
    own.go.release(1)
    outcome = await first
    await settle()
    assert own.dispatcher.scheduler.free == 3 and not second.done()
    own.dispatcher.release(outcome.reservation)
    own.go.release(1)
    assert (await second).result == "b!"


@bench()
async def _without_memory(own: Bench) -> None:
    """What has its memory already does not wait for those who wait for it: they might wait for each other."""
    first = own.begin("a", 8, keeps=8)
    own.go.release(1)
    outcome = await first
    waiting = own.begin("b", 8)
    await settle()
    own.go.release(1)
    assert (await own.begin("backward", 0)).result == "backward!"
    own.dispatcher.release(outcome.reservation)
    own.go.release(1)
    await waiting


@bench()
async def _taken_back(own: Bench) -> None:
    running, ready, waiting = own.begin("a", 5), own.begin("b", 5), own.begin("c", 5)
    await settle()
    for task in (ready, waiting):
        task.cancel()
    await settle()
    assert own.dispatcher.scheduler.free == 5
    running.cancel()  # too late: it is being computed, and its memory is free afterwards
    await settle()
    own.go.release(1)
    while own.dispatcher.scheduler.free != 10:
        await asyncio.sleep(0.001)
    assert own.computed == [["a"]]


@bench()
async def _failing(own: Bench) -> None:
    def fail(works: Sequence[Work]) -> list[str]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await own.dispatcher.compute(Work("client", fail, "a", 4, keeps=2))
    own.go.release(1)
    assert (await own.begin("b", 10)).result == "b!"
    with pytest.raises(ValueError, match="more than"):
        await own.begin("too large", 11)


@pytest.mark.parametrize("test", [_in_order, _together, _kept, _without_memory, _taken_back, _failing])
def test_dispatcher(test: Callable[[], None]) -> None:
    test()


@bench()
async def test_cancelling_in_the_moment_of_the_end_frees_what_would_stay(bench: Bench) -> None:
    task = bench.begin("a", keeps=4)
    await settle()
    work = bench.dispatcher._finish
    cancelled: list[bool] = []

    def finish_and_cancel(*arguments: Any) -> None:
        work(*arguments)
        cancelled.append(task.cancel())

    bench.dispatcher._finish = finish_and_cancel  # type: ignore[method-assign, assignment]
    bench.go.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [True]
