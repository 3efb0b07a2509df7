"""The server's end against clients that break the protocol, stall or leave: only their own streams end."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import torch

from megatron_mux.errors import UserError
from megatron_mux.split.certificates import revoke_certificates
from megatron_mux.split.protocol.framing import FRAME_BYTES, Assembly, frames
from megatron_mux.split.protocol.messages import Message, Output, Refusal
from megatron_mux.split.protocol.wire import METHOD, Dtype, Header, Kind, RefusedError
from megatron_mux.split.server import stream as server_stream
from megatron_mux.split.server.bytes_in_flight import BytesInFlight
from megatron_mux.split.server.service import ServerTls, Service
from tests.unit.split.toy_server import REPLIED, Files, Loop, ToyHandler, forward, transport

Served = tuple[int, ToyHandler]


class RawStream:
    """A stream of any bytes, without checks."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.call: Any = channel.stream_stream(METHOD)(iter(self._outbox.get, None))

    def send(self, parts: Iterable[bytes | None]) -> None:
        for part in parts:
            self._outbox.put(part)

    def receive(self) -> Message | None:
        """The next message; None at the end of the stream."""
        assembly: Assembly | None = None
        for frame in self.call:
            assembly = assembly or Assembly(Header.read(frame))
            if assembly.add(frame):
                return assembly.message(REPLIED)
        return None

    def refused(self) -> str:
        """The code of the ERROR that ends the stream."""
        message = self.receive()
        assert message is not None and message.kind is Kind.ERROR
        assert self.receive() is None and self.call.code() is grpc.StatusCode.OK
        return message.read(Refusal).code


@contextmanager
def raw(port: int, files: Files, name: str = "alice") -> Iterator[grpc.Channel]:
    tls = files.client(name)
    content = (file.read_bytes() for file in (tls.ca, tls.key, tls.certificate))
    with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(*content)) as channel:
        yield channel


def test_streams_that_break_the_protocol(served: Served, files: Files) -> None:
    port, _ = served
    parts = list(frames(forward(1024)))  # 5 frames
    giant = Header.read(parts[0])
    giant = replace(giant, rows=1 << 28, tensor_bytes=giant.tensor_bytes << 18)
    spoilt = forward()
    assert spoilt.tensor is not None
    spoilt.tensor[1, 5] = float("nan")
    cases: dict[str, list[list[bytes]]] = {
        "header": [[b""], [b"x" * 64], [parts[1]], [*parts, parts[-1]]],
        "frame": [
            [*parts[:2], *parts[3:]],
            [*parts[:2], *parts[1:]],
            [parts[0], parts[2]],
            [parts[0][:-1]],
            [parts[0], parts[0]],
            [*parts[:4], parts[4] + b"x"],
        ],
        "size": [[giant.pack()], list(frames(forward(4097)))],
        "dtype": [list(frames(replace(forward(), dtype=Dtype.BF16)))],
        "kind": [
            list(frames(Message(Kind.OUTPUT, fields=Output(), tensor=torch.ones(1, 1024), dtype=Dtype.F32)))
        ],
        "json": [
            [
                replace(Header.read(parts[0]), json_bytes=1, tensor_bytes=4096, rows=1).pack()
                + b"{"
                + bytes(4096)
            ]
        ],
        "finite": [list(frames(spoilt))],
    }
    with raw(port, files) as channel, transport(port, files.client("bob")) as bob:
        for code, streams in cases.items():
            for stream_parts in streams:
                stream = RawStream(channel)
                stream.send(stream_parts)
                if len(stream_parts) == 6 and code == "header":
                    first = stream.receive()
                    assert first is not None and first.kind is Kind.OUTPUT
                assert stream.refused() == code
        assert bob.call(forward(), 10).kind is Kind.OUTPUT
        stream = RawStream(channel)
        stream.send([bytes(FRAME_BYTES + 1)])
        with pytest.raises(grpc.RpcError, match="larger than max"):
            stream.receive()
        assert bob.call(forward(), 10).kind is Kind.OUTPUT


def test_the_handler_is_cancelled_when_its_client_breaks_the_protocol_or_leaves(
    served: Served, files: Files
) -> None:
    port, handler = served
    with raw(port, files) as channel:
        stream = RawStream(channel)
        stream.send(frames(forward(do="wait")))
        handler.wait(lambda: len(handler.received) == 1)
        stream.send([b"noise"])
        assert stream.refused() == "header" and handler.cancelled == 1
        stream = RawStream(channel)
        stream.send(frames(forward(do="wait")))
        handler.wait(lambda: len(handler.received) == 2)
        stream.call.cancel()
        handler.wait(lambda: handler.cancelled == 2)


def test_pings_are_answered_while_the_handler_works(served: Served, files: Files) -> None:
    port, _ = served
    with raw(port, files) as channel:
        stream = RawStream(channel)
        stream.send([*frames(forward(do="wait")), *frames(Message(Kind.PING))])
        pong = stream.receive()
        assert pong is not None and pong.kind is Kind.PONG
        stream.send([next(frames(Message(Kind.PING))) + b"x"])
        assert stream.refused() == "frame"


def test_a_client_that_stalls(served: Served, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_stream, "_SECONDS_OF_A_FRAME", 0.3)
    port, _ = served
    parts = list(frames(forward(1024)))
    with raw(port, files) as alice, transport(port, files.client("bob")) as bob:
        streams = [RawStream(alice) for _ in range(3)]
        for stream in streams:
            stream.send(parts[:2])
        bob.call(forward(), 10)
        # Streams of one client take turns, so the last one has waited for the others.
        began = time.monotonic()
        assert [stream.refused() for stream in streams] == ["slow"] * 3
        assert time.monotonic() - began > 0.6


def test_a_client_that_does_not_read(served: Served, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_stream, "_SECONDS_OF_A_FRAME", 0.3)
    port, handler = served
    with raw(port, files) as alice, transport(port, files.client("bob")) as bob:
        stream = RawStream(alice)
        stream.send(frames(forward(1024, do="flood")))
        handler.wait(lambda: len(handler.received) == 1)
        assert bob.call(forward(), 10).kind is Kind.OUTPUT
        time.sleep(0.5)
        count = sum(1 for _ in stream.call)
        assert 0 < count < 100 and stream.call.code() is grpc.StatusCode.OK


def test_stopping_waits_for_streams_and_then_cancels_them(loop: Loop, files: Files) -> None:
    with loop.service(files.server()) as (service, handler), raw(service.port, files) as channel:
        streams = [RawStream(channel), RawStream(channel)]
        for stream in streams:
            stream.send(frames(forward(do="wait")))
        handler.wait(lambda: len(handler.received) == 2)
        stopping = threading.Thread(target=lambda: loop.run(service.stop(0.5)))
        stopping.start()
        streams[0].call.cancel()
        handler.wait(lambda: handler.cancelled == 1)
        with pytest.raises(UserError), transport(service.port, files.client("bob"), retry_seconds=0) as bob:
            bob.call(forward(), 1)
        stopping.join(5)
        handler.wait(lambda: handler.cancelled == 2)
        with pytest.raises(grpc.RpcError):
            streams[1].receive()


def test_clients_without_a_certificate(served: Served, files: Files) -> None:
    port, handler = served
    credentials = grpc.ssl_channel_credentials(files.client().ca.read_bytes())
    for channel in (
        grpc.secure_channel(f"localhost:{port}", credentials),
        grpc.insecure_channel(f"localhost:{port}"),
    ):
        stream = RawStream(channel)
        stream.send(frames(forward()))
        with pytest.raises(grpc.RpcError) as failed:
            stream.receive()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        channel.close()
    assert not handler.received


def test_a_name_is_listened_on_at_all_its_addresses_or_not_at_all(
    loop: Loop, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else clients meet another process at the address that gRPC went without; those of no machine are left out."""
    addresses = ["127.0.0.1", "192.0.2.1", "127.0.0.2", "127.0.0.1"]

    def resolve(host: str, port: int, type: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(socket.AF_INET, type, 6, "", (ip, port)) for ip in addresses]

    monkeypatch.setattr("megatron_mux.split.server.service.socket.getaddrinfo", resolve)
    with socket.create_server(("127.0.0.2", 0)) as other:
        with pytest.raises(UserError, match="the port is taken"):
            loop.run(Service(ToyHandler(), f"localhost:{other.getsockname()[1]}", files.server()).start())
        with loop.service(files.server(), host="localhost") as (service, _):
            for ip in ("127.0.0.1", "127.0.0.2"):
                with socket.socket() as client:
                    client.connect((ip, service.port))
        addresses[:] = ["192.0.2.1"]
        with pytest.raises(UserError, match="not this machine's"):
            loop.run(Service(ToyHandler(), "elsewhere:0", files.server()).start())


def test_where_a_service_cannot_listen(loop: Loop, files: Files) -> None:
    def start(address: str, tls: ServerTls | None) -> None:
        loop.run(Service(ToyHandler(), address, tls).start())

    with loop.service(files.server()) as (service, _):
        for address in (f"127.0.0.1:{service.port}", "192.0.2.1:0"):
            with pytest.raises(UserError, match="the port is taken"):
                start(address, files.server())
    with pytest.raises(UserError, match="without TLS"):
        start("0.0.0.0:0", None)
    with pytest.raises(UserError, match="HOST:PORT"):
        start("localhost", files.server())
    with pytest.raises(UserError, match="are not a certificate"):
        start("127.0.0.1:0", replace(files.server(), key=files.client().key))


def test_bytes_in_flight_are_taken_in_order() -> None:
    async def take_and_give() -> None:
        flight = BytesInFlight(10)
        order: list[int] = []

        async def take(size: int) -> None:
            await flight.take(size)
            order.append(size)

        await take(8)
        tasks = [asyncio.create_task(take(size)) for size in (9, 3, 1)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [8]  # 1 byte would fit, but it came last
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        await asyncio.sleep(0)
        assert order == [8] and flight.free == 2
        flight.give(8)
        # Cancelled when it was served, but has not run since.
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert order == [8, 1] and flight.free == 9

    asyncio.run(take_and_give())


def test_one_client_cannot_have_all_streams(loop: Loop, files: Files) -> None:
    with loop.service(files.server()) as (service, _):
        service._most_streams_each = 2
        with raw(service.port, files) as channel:
            held = [RawStream(channel) for _ in range(2)]
            for stream in held:
                stream.send(frames(Message(Kind.PING)))
                assert stream.receive() is not None
            more = RawStream(channel)
            more.send(frames(Message(Kind.PING)))
            with pytest.raises(grpc.RpcError, match="too many streams"):
                more.receive()
        with raw(service.port, files, "bob") as channel:
            other = RawStream(channel)
            other.send(frames(Message(Kind.PING)))
            assert other.receive() is not None


def test_a_stream_without_a_message_ends(
    served: Served, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_stream, "_SECONDS_OF_FIRST", 0.3)
    port, _ = served
    with raw(port, files) as channel:
        silent, pinging = RawStream(channel), RawStream(channel)
        pinging.send(frames(Message(Kind.PING)))
        assert pinging.receive() is not None
        for stream in (silent, pinging):
            assert stream.refused() == "slow"


def test_streams_of_a_revoked_certificate_end(
    loop: Loop, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home, own = tmp_path / "own", Files.__new__(Files)
    shutil.copytree(files.own, home)
    own.own = home
    with (
        loop.service(own.server()) as (service, _),
        transport(service.port, own.client()) as alice,
        transport(service.port, own.client("bob")) as bob,
    ):
        for client in (alice, bob):
            assert client.call(forward(), 10).kind is Kind.OUTPUT
        waiting = ThreadPoolExecutor(1).submit(alice.call, forward(operation=2, do="wait"), 20)
        (home / "crl.pem").write_text("half of a list")
        until = time.monotonic() + 10
        while "no list of revoked certificates" not in caplog.text and time.monotonic() < until:
            time.sleep(0.05)
        assert "stays in force" in caplog.text and not waiting.done()
        began = time.monotonic()
        (home / "crl.pem").unlink()
        revoke_certificates(home, ["alice"])
        with pytest.raises(RefusedError, match="was revoked") as refused:
            waiting.result(20)
        assert refused.value.code == "revoked" and time.monotonic() - began < 5
        with pytest.raises(RefusedError, match="was revoked"):
            alice.call(forward(operation=3), 10)
        assert bob.call(forward(operation=3), 10).kind is Kind.OUTPUT
    (home / "crl.pem").write_text("half of a list")
    with pytest.raises(UserError, match="no list of revoked certificates"), loop.service(own.server()):
        pass
