"""A service with a handler of a few lines, in a thread, and a relay that damages connections to it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_mux.split.certificates import make_ca, make_client, make_server
from megatron_mux.split.client.transport import ClientTls, Transport
from megatron_mux.split.protocol.agreement import Fields, Terms
from megatron_mux.split.protocol.messages import Forward, Gradient, Message, Output, StateReply
from megatron_mux.split.protocol.wire import REPLIES, Dtype, Kind, Limits, RefusedError
from megatron_mux.split.server.service import Send, ServerTls, Service
from megatron_mux.split.server.stream import ServerStream

LIMITS = Limits(kinds=frozenset(REPLIES), rows=4096, width=1024, dtype=Dtype.F32, piece_bytes=1 << 20)
REPLIED = replace(LIMITS, kinds=frozenset(REPLIES.values()))
DEEDS = ("", "wait", "refuse", "busy", "fail", "nan", "twice", "flood")
"""What a request asks the handler to do, by the number of its first sequence."""
_FIELDS: dict[Kind, Fields] = {
    Kind.WELCOME: Terms(session=1, step=0, policy="toy", forward_bytes=1, backward_bytes=1),
    Kind.OUTPUT: Output(),
    Kind.GRADIENT: Gradient(),
    Kind.STATE_REPLY: StateReply(total=0),
}


class ToyHandler:
    """Answers each request with its own tensor, and does what it asks for."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Message]] = []
        self.cancelled = 0
        self.changed = threading.Condition()
        self.go_on = asyncio.Event()
        self.refusals = [RefusedError("busy", "Come back later.", retry=True)] * 2

    def limits(self, identity: str) -> Limits:
        return LIMITS

    async def session(self, identity: str, incoming: ServerStream, send: Send) -> None:
        try:
            async for message in incoming:
                with self.changed:
                    self.received.append((identity, message))
                    self.changed.notify_all()
                await self.answer(message, send)
        except asyncio.CancelledError:
            with self.changed:
                self.cancelled += 1
                self.changed.notify_all()
            raise

    async def answer(self, message: Message, send: Send) -> None:
        kind = REPLIES[message.kind]
        reply = replace(message, kind=kind, fields=_FIELDS.get(kind, Fields()), pieces=())
        match DEEDS[message.fields.ids[0]] if isinstance(message.fields, Forward) else "":
            case "wait":
                await self.go_on.wait()
            case "refuse":
                raise RefusedError("too_large", "Too large.")
            case "busy" if self.refusals:
                raise self.refusals.pop()
            case "fail":
                raise ZeroDivisionError
            case "nan":
                assert message.tensor is not None
                message.tensor.fill_(float("nan"))
            case "twice":
                await send(reply)
            case "flood":
                while True:
                    await send(reply)
        await send(reply)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until a condition on what has happened holds."""
        with self.changed:
            assert self.changed.wait_for(condition, 10)


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    @contextmanager
    def service(
        self,
        tls: ServerTls | None,
        handler: ToyHandler | None = None,
        port: int = 0,
        most: int = 1 << 30,
        host: str = "127.0.0.1",
    ) -> Iterator[tuple[Service, ToyHandler]]:
        """A service that runs meanwhile."""
        handler = handler or ToyHandler()
        service = Service(handler, f"{host}:{port}", tls, most)
        self.run(service.start())
        try:
            yield service, handler
        finally:
            self.run(service.stop(0))


class Files:
    """Certificates of all sorts, below a directory."""

    def __init__(self, directory: Path) -> None:
        later, earlier = (datetime.now(UTC) + timedelta(days=days) for days in (1, -1))
        for name in ("own", "other"):
            ca = make_ca()
            home = directory / name
            ca.write(home, "ca")
            make_server(ca, ["localhost"], later).write(home, "server")
            make_server(ca, ["localhost"], earlier).write(home, "server-expired")
            make_server(ca, ["elsewhere"], later).write(home, "server-elsewhere")
            make_client(ca, "alice", later).write(home, "alice")
            make_client(ca, "bob", later).write(home, "bob")
            make_client(ca, "alice", earlier).write(home, "alice-expired")
            make_client(ca, "../alice", later).write(home, "alice-path")
        self.own, self.other = directory / "own", directory / "other"

    def server(self, name: str = "server") -> ServerTls:
        return ServerTls(self.own / f"{name}.pem", self.own / f"{name}.key", self.own / "ca.pem")

    def client(self, name: str = "alice", **more: Any) -> ClientTls:
        return ClientTls(self.own / "ca.pem", self.own / f"{name}.pem", self.own / f"{name}.key", **more)


@contextmanager
def transport(port: int, tls: ClientTls | None, host: str = "localhost", **more: Any) -> Iterator[Transport]:
    """A client that keeps what it says in `said`."""
    said: list[str] = []
    client = Transport(f"{host}:{port}", tls, REPLIED, say=said.append, **more)
    client.said = said  # type: ignore[attr-defined]
    try:
        yield client
    finally:
        client.close()


def forward(rows: int = 3, operation: int = 1, do: str = "") -> Message:
    tensor = torch.arange(1024.0 * rows).view(rows, 1024)
    fields = Forward(lengths=[rows], ids=[DEEDS.index(do)])
    return Message(Kind.FORWARD, 1, 2, operation, fields=fields, tensor=tensor, dtype=Dtype.F32)


class Relay:
    """Forwards connections to a port.

    Attributes:
        port: Where to connect.
        open: Cleared, connections pass nothing on.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.open = threading.Event()
        self.open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._target))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                self.open.wait()
                target.sendall(content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
