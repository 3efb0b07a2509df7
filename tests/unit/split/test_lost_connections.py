"""Nothing is lost, leaked or mixed up when clients go away, or servers stop, at an awkward moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megatron_mux.split.client.transport import DeadlineError
from megatron_mux.split.protocol.messages import Leave
from megatron_mux.split.protocol.wire import Kind, RefusedError
from tests.unit.split.caller import RUN, Caller, backbone, busy, equal, parallel, path, server
from tests.unit.split.running_server import RunningServer

__all__ = ["backbone", "parallel", "path", "server"]  # fixtures


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the server does in the background."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_connection_lost_while_beginning_again_leaves_no_gradients(server: RunningServer) -> None:
    caller, undisturbed = Caller(server), Caller(server, task="undisturbed")
    undisturbed.join()
    caller.join()
    caller.call(caller.forward(seed=5))
    caller.call(caller.backward(caller.operation))
    caller.transport.close()
    again = Caller(server, incarnation="cd" * 8)
    with busy(server), pytest.raises(DeadlineError):
        again.join(0.5)  # its gradients are to be forgotten, but its connection breaks before
    again.join()
    assert equal(again.train_step(), undisturbed.train_step())
    assert equal(again.state(), undisturbed.state())


def test_a_connection_lost_while_its_old_session_ends_leaks_nothing(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    training = {"max_steps": 9, "learning_rate": 0.01}
    with busy(server), pytest.raises(DeadlineError):
        Caller(server, training=training).join(0.5)
    until(lambda: server.server.dispatcher.scheduler.free == server.capacity)
    other = Caller(server, training=training)
    other.join()
    other.train_step()
    other.call(other.message(Kind.LEAVE, Leave(finished=True)))
    assert server.server.dispatcher.scheduler.free == server.capacity


def test_runs_of_one_name_keep_their_saves_apart(server: RunningServer) -> None:
    first, second = Caller(server), Caller(server, run="34" * 8)
    for own, steps in ((first, 1), (second, 2)):
        own.join()
        for _ in range(steps):
            own.train_step()
        own.state()
    assert server.store.steps(f"local/one/{RUN}") == [1]
    with pytest.raises(RefusedError) as refused:
        Caller(server, step=2, incarnation="cd" * 8).join()
    assert refused.value.code == "no_state"
    again = Caller(server, step=1, incarnation="ef" * 8)
    again.join()
    undisturbed = Caller(server, task="undisturbed")
    undisturbed.join()
    undisturbed.train_step()
    assert equal(again.train_step(), undisturbed.train_step())


def test_an_upload_of_another_start_is_not_gone_on_with(server: RunningServer) -> None:
    uploading, fresh = Caller(server, uploads=True), Caller(server, incarnation="cd" * 8)
    uploading.join()
    number = uploading.session
    fresh.join()
    assert fresh.session != number


def test_what_cannot_be_saved_stays_and_keeps_nobody_from_draining(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = [Caller(server, task=name) for name in ("one", "two")]
    for caller in callers:
        caller.join()
    save = server.store.save

    def full(saves: str, *arguments: Any) -> None:
        if "/one/" in saves:
            raise OSError(28, "No space left on device")
        save(saves, *arguments)

    monkeypatch.setattr(server.store, "save", full)
    sessions = server.server.sessions
    one = sessions["local/one"]
    callers[0].transport.close()
    until(lambda: one.stream is None)
    timer = one.expiry
    asyncio.run_coroutine_threadsafe(server.server._expire(one), server.loop).result(20)
    assert sessions["local/one"] is one and one.expiry is not timer
    asyncio.run_coroutine_threadsafe(server.server.drain(1), server.loop).result(20)
    assert server.store.steps(f"local/two/{RUN}") == [0]


def test_a_damaged_save_is_as_good_as_none(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    caller.train_step()
    caller.state()
    caller.call(caller.message(Kind.LEAVE, Leave()))
    (file,) = server.store.directory.glob("local/one/*/step-1.safetensors")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(RefusedError) as refused:
        Caller(server, step=1, incarnation="cd" * 8).join()
    assert refused.value.code == "no_state"


def test_leaving_and_joining_at_once_do_not_wait_for_each_other(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    caller.train_step()
    other = Caller(server, training={"max_steps": 9, "learning_rate": 0.01})
    with ThreadPoolExecutor(2) as pool:
        with busy(server):
            leaving = pool.submit(caller.call, caller.message(Kind.LEAVE, Leave()))
            until(lambda: server.server.dispatcher.queued == 1)  # the update before
            session = server.server.sessions["local/one"]
            joining = pool.submit(other.join)
            until(lambda: session.ending is not None)
        joining.result(10)
        with pytest.raises((RefusedError, DeadlineError)):
            leaving.result(30)  # its stream has been replaced
    other.train_step()
    assert list(server.server.sessions) == ["local/one"]
