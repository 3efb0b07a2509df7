"""What the server answers: every operation once, steps once, only to whom they belong, and after it was killed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.runtime import Parallel
from megatron_mux.split.client.transport import DeadlineError
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.protocol.messages import Decision, Leave, Message, State
from megatron_mux.split.protocol.wire import Kind, RefusedError
from megatron_mux.split.server import attachments, session_compute
from megatron_mux.split.server.session_memory import Memory
from tests.unit.split.caller import (
    HIDDEN,
    ROWS,
    RUN,
    Caller,
    backbone,
    busy,
    equal,
    norm_of,
    parallel,
    path,
    server,
)
from tests.unit.split.running_server import RunningServer, running_server

__all__ = ["backbone", "parallel", "path", "server"]  # fixtures


def test_an_operation_that_comes_again_is_computed_once(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    forward = caller.forward()
    first, again = caller.call(forward), caller.call(forward)
    assert first.tensor is not None and again.tensor is not None and torch.equal(first.tensor, again.tensor)
    backward = caller.backward(forward.operation)
    squares = [norm_of(caller.call(backward)) for _ in range(3)]
    assert len(set(squares)) == 1, "gradients were added once"
    caller.previous = Decision(step=0, norm=1.0)
    caller.step = 1
    save = caller.message(Kind.STATE, State())
    states = [[piece.tensor for piece in caller.call(save).pieces] for _ in range(2)]
    assert equal(*states), "the step was taken once"
    with pytest.raises(RefusedError):  # it would have to join again
        caller.call(forward)
    assert server.server.metrics.refused.labels("replayed")._value.get() == 1


def test_a_decision_that_comes_again_takes_no_second_step(server: RunningServer) -> None:
    """A client that lost its connection repeats what it decided with another request."""
    caller = Caller(server)
    caller.join()
    caller.train_step()
    decision = caller.previous
    first = caller.state()
    caller.previous = decision
    assert equal(caller.state(), first)


def test_a_gradient_is_of_the_forward_pass_that_it_names(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    first, second = caller.forward(), caller.forward(seed=1)
    for forward in (first, second):
        caller.call(forward)
    with pytest.raises(RefusedError, match="waits for its backward"):
        caller.call(caller.backward(first.operation))


def test_a_client_that_was_killed_goes_on_from_its_save(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    caller.train_step()
    state = caller.state()
    wanted = [*caller.train_step(), *caller.train_step()]
    caller.transport.close()
    again = Caller(server, step=1, incarnation="cd" * 8)
    assert again.join().step == 1
    assert equal(again.state(), state)
    assert equal([*again.train_step(), *again.train_step()], wanted)


def test_a_server_that_was_killed_goes_on_from_the_clients_save(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    caller.train_step()
    caller.state()
    wanted = caller.train_step()
    server.restart()
    caller.transport.close()
    with pytest.raises(RefusedError) as refused:
        Caller(server, step=2).join()
    assert refused.value.code == "no_state"
    again = Caller(server, step=1)
    again.join()
    assert equal(again.train_step(), wanted)


def test_a_server_that_is_told_to_stop_lets_steps_finish_and_saves(server: RunningServer) -> None:
    caller, other = Caller(server), Caller(server, task="idle")
    caller.join()
    other.join()
    other.train_step()
    caller.train_step()
    caller.call(caller.forward(seed=10))
    caller.call(caller.backward(caller.operation, seed=11))
    draining = asyncio.run_coroutine_threadsafe(server.server.drain(20), server.loop)
    with pytest.raises((RefusedError, DeadlineError)):
        other.transport.call(other.forward(), 0.5)
    assert caller.train_step(), "the second micro-batch of a step that has begun"
    assert not draining.done(), "the client has not said what becomes of the step"
    with pytest.raises((RefusedError, DeadlineError)):
        caller.transport.call(caller.forward(seed=20), 0.5)
    draining.result(5)
    assert server.store.steps(f"local/one/{RUN}") == [2], "its step was taken, then it was saved"
    assert server.store.steps(f"local/idle/{RUN}") == [1]
    wanted = Caller(server, task="wanted")
    server.restart()
    wanted.join()
    wanted.train_step()
    wanted.call(wanted.forward(seed=10))
    wanted.call(wanted.backward(wanted.operation, seed=11))
    wanted.train_step()
    again = Caller(server, step=2)
    again.join()
    assert equal(again.train_step(), wanted.train_step())


def test_a_skipped_step_leaves_the_adapter_as_it_was(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    before = caller.state()
    caller.train_step()
    caller.step = 0
    caller.previous = Decision(step=0, norm=0.0, skip=True)
    assert equal(caller.state(), before)
    wanted = caller.train_step()
    fresh = Caller(server, task="two")
    fresh.join()
    assert equal(fresh.train_step(), wanted), "gradients of the skipped step are gone"


@pytest.mark.parametrize("policy", ["preserve", "auto"])
def test_policies_compute_the_same(
    backbone: Backbone, parallel: Parallel, server: RunningServer, tmp_path: Path, policy: str
) -> None:
    caller = Caller(server)
    caller.join()
    wanted = [*caller.train_step(), *caller.train_step()]
    with running_server(backbone, parallel, tmp_path / "other", policy=policy) as running:
        other = Caller(running)
        assert other.join().policy == policy
        assert equal([*other.train_step(), *other.train_step()], wanted)
        scheduler, session = running.server.dispatcher.scheduler, running.server.sessions["local/one"]
        assert scheduler.free == running.capacity - session.memory.lasting, "nothing else stays reserved"


def test_a_forward_pass_without_a_backward_is_forgotten(server: RunningServer) -> None:
    caller, undisturbed = Caller(server), Caller(server, task="undisturbed")
    for own in (caller, undisturbed):
        own.join()
    free = server.server.dispatcher.scheduler.free
    for seed in range(4):  # their gradients were not finite, say
        caller.call(caller.forward(seed))
    assert free - server.server.dispatcher.scheduler.free == ROWS * HIDDEN * 8
    assert equal(caller.train_step(), undisturbed.train_step())
    assert server.server.dispatcher.scheduler.free == free


def test_a_client_that_is_away_keeps_no_graph(backbone: Backbone, parallel: Parallel, tmp_path: Path) -> None:
    with running_server(backbone, parallel, tmp_path / "store", policy="preserve") as server:
        caller, undisturbed = Caller(server), Caller(server, task="undisturbed")
        for own in (caller, undisturbed):
            own.join()
        scheduler = server.server.dispatcher.scheduler
        free, wanted = scheduler.free, undisturbed.train_step()
        caller.call(caller.forward())
        assert free - scheduler.free > ROWS * HIDDEN * 8
        caller.transport.close()
        until = time.monotonic() + 10
        while free - scheduler.free != ROWS * HIDDEN * 8 and time.monotonic() < until:
            time.sleep(0.01)
        assert free - scheduler.free == ROWS * HIDDEN * 8
        caller.join()  # on a new stream
        assert torch.equal(wanted[1], caller.call(caller.backward(caller.operation)).tensor)  # type: ignore[arg-type]
        assert scheduler.free == free


def test_a_session_is_let_in_when_there_is_room(
    backbone: Backbone, parallel: Parallel, tmp_path: Path
) -> None:
    with running_server(backbone, parallel, tmp_path / "probe") as server:
        Caller(server).join()
        memory = server.server.sessions["local/one"].memory
    capacity = memory.standing + memory.most(2 * ROWS) + memory.standing // 2
    options: dict[str, Any] = {"capacity": capacity, "most_memory_each": 1.0}
    with running_server(backbone, parallel, tmp_path / "store", **options) as server:
        first, second = Caller(server), Caller(server, task="two")
        first.join()
        with pytest.raises(DeadlineError, match="sessions use the server's memory"):
            second.join(1)
        first.train_step()
        first.call(first.message(Kind.LEAVE, Leave(finished=True)))
        second.join()
        assert second.train_step()


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.3},
    "wide": {"peft_type": "LORA", "r": 8, "target_modules": "all-linear"},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2},
    "bottleneck": {"peft_type": "BOTTLENECK", "bottleneck_size": 4},
    "dora": {"peft_type": "LORA", "r": 4, "use_dora": True, "rank_pattern": {"q_proj": 2}},
}


def at_once(server: RunningServer, callers: list[Caller], messages: list[Message]) -> list[Message]:
    """Replies to messages that all wait for the compute thread at the same time."""
    with ThreadPoolExecutor(len(callers)) as pool:
        with busy(server):
            replies = [pool.submit(caller.call, own) for caller, own in zip(callers, messages, strict=True)]
            while server.server.dispatcher.queued < len(callers):
                time.sleep(0.005)
        return [reply.result(20) for reply in replies]


def test_sessions_computed_together_learn_what_each_learns_alone(
    backbone: Backbone, parallel: Parallel, tmp_path: Path
) -> None:
    found = []
    for most in (0, 1024):
        with running_server(backbone, parallel, tmp_path / str(most), together=most) as server:
            callers = [Caller(server, task=name, adapter=adapter) for name, adapter in ADAPTERS.items()]
            for caller in callers:
                caller.join()
            made = []
            for step in range(4):
                outputs = at_once(server, callers, [caller.forward(seed=step) for caller in callers])
                gradients = at_once(
                    server, callers, [caller.backward(caller.operation, seed=step) for caller in callers]
                )
                for caller, gradient in zip(callers, gradients, strict=True):
                    caller.decide(gradient)
                made += [reply.tensor for reply in (*outputs, *gradients)]
            made += [tensor for caller in callers for tensor in caller.state()]
            counted = server.server.metrics.together._value.get()
            assert counted >= 20 if most else not counted, (
                "of 32 passes; some forward passes wait for updates"
            )
            found.append(made)
    for alone, together in zip(*found, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-7, atol=1e-10)


def test_what_became_of_a_session_is_logged(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "split server in a test")
    caller = Caller(server, incarnation="00" * 8)
    caller.join()
    caller.transport.close()
    until = time.monotonic() + 10
    while "away" not in caplog.messages and time.monotonic() < until:
        time.sleep(0.02)
    for number, finished in ((1, False), (2, True)):
        caller = Caller(server, incarnation=f"{number}0" * 8)
        caller.join()
        caller.train_step()
        caller.call(caller.message(Kind.LEAVE, Leave(finished=finished)))
    steps = {record.message: getattr(record, "fields", {}).get("step") for record in caplog.records}
    assert list(steps) == ["joined", "away", "left", "finished"]
    assert steps["away"] == 0 and steps["left"] == steps["finished"] == 1


def test_a_body_that_clients_do_not_get_stays_when_they_have_finished(
    backbone: Backbone, parallel: Parallel, tmp_path: Path
) -> None:
    with running_server(backbone, parallel, tmp_path / "store", returns_body=False) as server:
        for number in (1, 2):
            caller = Caller(server, incarnation=f"{number}0" * 8)
            caller.join()
            caller.train_step()
            assert not caller.state()
            caller.call(caller.message(Kind.LEAVE, Leave(finished=True)))
            assert (server.store.directory / f"local/one/final-{number}.safetensors").is_file()


def test_a_killed_client_begins_its_step_again(server: RunningServer) -> None:
    """What its earlier process had done of the step counts no more."""
    caller, fresh = Caller(server), Caller(server, task="fresh")
    fresh.join()
    wanted = [*fresh.train_step(), *fresh.train_step()]
    caller.join()
    first = caller.train_step()  # the server is not told what became of the step
    caller.transport.close()
    again = Caller(server, incarnation="cd" * 8)
    again.join()
    assert equal(again.train_step(), first)
    assert equal([*first, *again.train_step()], wanted)


def test_a_client_that_is_killed_while_joining_may_come_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    Caller(server, task="another").join()  # from now on the server knows what such a session takes
    begun, may_end, attach = threading.Event(), threading.Event(), session_compute.attach

    def slow(*arguments: Any) -> None:
        begun.set()
        may_end.wait(10)
        attach(*arguments)

    monkeypatch.setattr(attachments, "attach", slow)
    with pytest.raises(DeadlineError):
        Caller(server).join(0.5)
    assert begun.is_set()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), server.loop).result()  # the server notices
    may_end.set()
    caller = Caller(server)
    caller.join()
    caller.train_step()
    assert server.server.dispatcher.scheduler.free == server.capacity - caller_memory(server)


def test_one_client_s_proposals_are_examined_one_by_one(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions are made by one process for all clients, whose proposals would wait behind those of one."""
    predict, at_once, most = server.server._predict, 0, 0

    async def counted(asked: Proposal) -> Memory:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.2)
        at_once -= 1
        return await predict(asked)

    monkeypatch.setattr(server.server, "_predict", counted)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda name: Caller(server, task=name).join(), ("one", "two", "three")))
    assert most == 1 and len(server.server.sessions) == 3


def caller_memory(server: RunningServer) -> int:
    return sum(session.memory.lasting for session in server.server.sessions.values())


def test_work_of_a_killed_client_does_not_reach_its_next_session(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass still waits, on a stream that nobody has noticed is dead, when the client begins anew."""
    caller = Caller(server)
    caller.join()
    wanted = caller.train_step()
    caller.call(caller.forward(seed=10))
    backward = caller.backward(caller.operation)
    monkeypatch.setattr(server.server, "_gone", lambda session: None)
    server.server.dispatcher.scheduler.free -= server.capacity  # nothing is admitted
    with pytest.raises(DeadlineError):
        caller.transport.call(backward, 0.5)
    again = Caller(server, incarnation="cd" * 8)
    joining = threading.Thread(target=again.join)
    joining.start()
    time.sleep(0.5)
    server.server.dispatcher.scheduler.free += server.capacity
    server.loop.call_soon_threadsafe(server.server.dispatcher._admit)
    joining.join(20)
    assert equal(again.train_step(), wanted)
