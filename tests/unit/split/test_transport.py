"""A client's calls over TLS: replies, refusals, deadlines, and connections that break."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest
import torch

from megatron_mux.errors import UserError
from megatron_mux.split.client import stream as client_stream
from megatron_mux.split.client import transport as transport_module
from megatron_mux.split.client.transport import DeadlineError, Exchange
from megatron_mux.split.protocol.messages import Message, Upload
from megatron_mux.split.protocol.pieces import Piece
from megatron_mux.split.protocol.wire import Dtype, Kind, RefusedError, WireError
from megatron_mux.split.server import stream as server_stream
from tests.unit.split.hostile_stream import hello
from tests.unit.split.toy_server import REPLIED, Files, Loop, Relay, ToyHandler, forward, transport

Served = tuple[int, ToyHandler]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE", 0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def assert_answers(reply: Message, request: Message) -> None:
    assert reply.tensor is not None and request.tensor is not None
    assert (reply.kind, reply.step, reply.operation) == (Kind.OUTPUT, request.step, request.operation)
    assert torch.equal(reply.tensor, request.tensor)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_calls(served: Served, files: Files, host: str) -> None:
    port, handler = served
    with transport(port, files.client(), host) as client:
        for rows, operation in ((1, 1), (1024, 2), (3, 3)):
            request = forward(rows, operation)
            assert_answers(client.call(request, 10), request)
        piece = Piece("a", "value", (3,), torch.ones(3, dtype=torch.bfloat16))
        upload = Message(Kind.UPLOAD, 1, fields=Upload(), pieces=[piece])
        assert client.call(upload, 10).kind is Kind.STORED
    identity, received = handler.received[-1]
    assert identity == "alice" and torch.equal(received.pieces[0].tensor, piece.tensor)


def test_a_server_that_comes_later(loop: Loop, files: Files) -> None:
    port = free_port()
    with transport(port, files.client()) as client:
        replies: list[Message] = []
        calling = threading.Thread(target=lambda: replies.append(client.call(forward(), 10)))
        calling.start()
        time.sleep(0.3)
        with loop.service(files.server(), port=port):
            calling.join(10)
        assert_answers(replies[0], forward())
        waiting, connected = client.said  # type: ignore[attr-defined]
        assert "waiting for the server" in waiting and "refused" in waiting and "connected" in connected


def test_a_server_that_does_not_come(files: Files) -> None:
    with transport(free_port(), files.client(), retry_seconds=0.2) as client:
        with pytest.raises(UserError, match="could not be reached"):
            client.call(forward(), 10)
        with pytest.raises(UserError, match="must be HOST:PORT"):
            transport_module.Transport("localhost", None, REPLIED).call(forward(), 1)


def test_a_server_that_says_it_stops_is_waited_for(loop: Loop, files: Files) -> None:
    port, handler = free_port(), ToyHandler()
    handler.refusals = [RefusedError("draining", "the server is about to stop", retry=True)] * 3
    with transport(port, files.client(), retry_seconds=0.2, restart_seconds=20) as client:
        request = forward(do="busy")
        replies: list[Message] = []
        calling = threading.Thread(target=lambda: replies.append(client.call(request, 10)))
        with loop.service(files.server(), handler, port):
            calling.start()
            handler.wait(lambda: not handler.refusals)
        time.sleep(1)  # longer than for a server that says nothing
        with loop.service(files.server(), handler, port):
            calling.join(10)
        assert_answers(replies[0], request)
        said = client.said  # type: ignore[attr-defined]
        assert ["stops; waiting up to" in said[0], "connected to" in said[-1], len(said)] == [True, True, 2]


def test_a_person_ends_the_wait_for_a_server(files: Files) -> None:
    with transport(free_port(), files.client()) as client:
        client.gives_up = lambda: True
        began = time.monotonic()
        with pytest.raises(UserError, match="could not be reached"):
            client.call(forward(), 60)
        assert time.monotonic() - began < 5


def test_a_server_that_comes_back(loop: Loop, files: Files) -> None:
    port, handler = free_port(), ToyHandler()
    with transport(port, files.client()) as client:

        def join(exchange: Exchange) -> None:
            assert exchange(hello(cut_back=2)).kind is Kind.WELCOME

        with loop.service(files.server(), handler, port):
            client.call(hello(), 10)
            client.on_reconnect = join
            client.call(forward(operation=1), 10)
        # The stream broke between two calls; the next one breaks in the middle.
        request = forward(operation=2, do="wait")
        replies: list[Message] = []
        calling = threading.Thread(target=lambda: replies.append(client.call(request, 10)))
        calling.start()
        with loop.service(files.server(), handler, port):
            handler.wait(lambda: len(handler.received) == 4)
        loop.loop.call_soon_threadsafe(handler.go_on.set)
        with loop.service(files.server(), handler, port):
            calling.join(10)
        assert_answers(replies[0], request)
    kinds = [message.kind.name for _, message in handler.received]
    assert kinds == ["HELLO", "FORWARD", "HELLO", "FORWARD", "HELLO", "FORWARD"]
    again = [message for _, message in handler.received][-3::2]
    assert replace(again[0], tensor=None) == replace(again[1], tensor=None)
    assert torch.equal(again[0].tensor, again[1].tensor)  # type: ignore[arg-type]
    assert sum("lost the connection" in line for line in client.said) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("do, code", [("refuse", "too_large"), ("fail", "internal")])
def test_refusals(served: Served, files: Files, do: str, code: str, caplog: pytest.LogCaptureFixture) -> None:
    port, _ = served
    with transport(port, files.client()) as client:
        with pytest.raises(RefusedError) as refused:
            client.call(forward(do=do), 10)
        assert refused.value.code == code and not refused.value.retry
        assert_answers(client.call(forward(), 10), forward())
    assert ("ZeroDivisionError" in caplog.text) == (do == "fail")


def test_refusals_for_the_moment_are_tried_again(served: Served, files: Files) -> None:
    port, handler = served
    with transport(port, files.client()) as client:
        request = forward(do="busy")
        assert_answers(client.call(request, 10), request)
        assert len(handler.received) == 3
        handler.refusals = [RefusedError("busy", "Come back later.", retry=True)] * 99
        with pytest.raises(DeadlineError, match="Come back later"):
            client.call(request, 1.5)  # the first refusal comes within it, also on a busy machine


def test_deadlines_cancel_what_the_server_does(served: Served, files: Files) -> None:
    port, handler = served
    with transport(port, files.client()) as client:
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="FORWARD 1 of step 2"):
            client.call(forward(do="wait"), 0.3)
        assert time.monotonic() - began < 2
        handler.wait(lambda: handler.cancelled == 1)
        assert_answers(client.call(forward(), 10), forward())


def test_replies_that_come_twice(served: Served, files: Files) -> None:
    port, _ = served
    with transport(port, files.client()) as client:
        for operation in range(4):
            request = forward(operation + 1, operation, do="twice")
            assert_answers(client.call(request, 10), request)


def test_replies_beyond_the_limits(served: Served, files: Files) -> None:
    port, _ = served
    with transport(port, files.client()) as client:
        with pytest.raises(WireError, match="not finite"):
            client.call(forward(do="nan"), 10)
        client.limits = replace(REPLIED, finite=False)
        reply = client.call(forward(do="nan"), 10)
        assert reply.tensor is not None and reply.tensor.isnan().all()
        client.limits = replace(REPLIED, dtype=Dtype.BF16)
        with pytest.raises(WireError, match="BF16 was agreed"):
            client.call(forward(), 10)


def test_heartbeats_tell_a_slow_server_from_a_lost_one(
    served: Served, files: Files, monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    monkeypatch.setattr(client_stream, "_SECONDS_OF_HEARTBEAT", 0.05)
    monkeypatch.setattr(server_stream, "_SECONDS_OF_HEARTBEAT", 0.05)
    monkeypatch.setattr(client_stream, "_SECONDS_OF_SILENCE", 2)  # a busy machine may be silent for one
    port, handler = served
    relay = Relay(port)
    with transport(relay.port, files.client()) as client:
        threading.Timer(2.5, lambda: loop.loop.call_soon_threadsafe(handler.go_on.set)).start()
        client.call(forward(do="wait"), 10)
        assert len(handler.received) == 1 and not client.said  # type: ignore[attr-defined]
        relay.open.clear()
        threading.Timer(2.5, relay.open.set).start()
        client.call(forward(), 10)
        assert "silent" in client.said[0]  # type: ignore[attr-defined]
    relay.close()


@pytest.mark.parametrize(
    "server, client, told",
    [
        ("server-expired", "alice", "the server's certificate has expired"),
        ("server-elsewhere", "alice", "the server's certificate is for another name"),
        ("server", "alice-expired", "alice-expired.pem has expired"),
        ("server", "server", "refuses the certificate .*server.pem"),
        ("server", "alice-path", "common name is no identity"),
    ],
)
def test_certificates(loop: Loop, files: Files, server: str, client: str, told: str) -> None:
    with loop.service(files.server(server)) as (service, handler):
        with transport(service.port, files.client(client)) as caller, pytest.raises(UserError, match=told):
            caller.call(forward(), 5)
        assert not caller.said and not handler.received  # type: ignore[attr-defined]


def test_certificates_of_another_ca(served: Served, files: Files) -> None:
    port, handler = served
    own, other = files.client(), files.other
    strange_server = replace(own, ca=other / "ca.pem")
    strange_client = replace(own, certificate=other / "alice.pem", key=other / "alice.key")
    for tls, told in ((strange_server, "did not sign"), (strange_client, "refuses the certificate")):
        with transport(port, tls) as client, pytest.raises(UserError, match=told):
            client.call(forward(), 5)
    assert not handler.received


def test_another_name_than_the_address(loop: Loop, files: Files) -> None:
    tls = files.client(server_name="elsewhere")
    with (
        loop.service(files.server("server-elsewhere")) as (service, _),
        transport(service.port, tls) as client,
    ):
        assert_answers(client.call(forward(), 10), forward())


def test_tls_on_one_end_only(loop: Loop, files: Files) -> None:
    with (
        loop.service(None) as (service, _),
        transport(service.port, files.client()) as client,
        pytest.raises(UserError, match="no server that speaks TLS"),
    ):
        client.call(forward(), 5)


def test_many_clients_share_few_bytes(loop: Loop, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_stream, "_SECONDS_OF_HEARTBEAT", 0.05)
    monkeypatch.setattr(client_stream, "_SECONDS_OF_HEARTBEAT", 0.05)
    monkeypatch.setattr(client_stream, "_SECONDS_OF_SILENCE", 0.4)
    request = forward(512, do="wait")  # 2 MiB
    with loop.service(files.server(), most=20 << 20) as (service, handler):
        replies: list[Message] = []

        def call() -> None:
            with transport(service.port, files.client()) as client:
                replies.append(client.call(request, 10))

        callers = [threading.Thread(target=call) for _ in range(5)]
        for caller in callers:
            caller.start()
        handler.wait(lambda: len(handler.received) == 2)
        time.sleep(0.6)  # longer than the silence that clients endure
        assert len(handler.received) == 2
        assert service.in_flight.free > 15 << 20, "a client has a quarter, the others have the rest"
        loop.loop.call_soon_threadsafe(handler.go_on.set)
        for caller in callers:
            caller.join(10)
        assert len(replies) == 5 and len(handler.received) == 5
        with (
            transport(service.port, files.client()) as client,
            pytest.raises(RefusedError, match="a client may have"),
        ):
            client.call(forward(2048), 10)
