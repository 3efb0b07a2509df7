"""The server's end of the wire: a gRPC service that hands each client's messages to a handler."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any, Protocol
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from cryptography import x509

from megatron_mux.errors import UserError
from megatron_mux.split.protocol.framing import FRAME_BYTES
from megatron_mux.split.protocol.messages import Message, Refusal
from megatron_mux.split.protocol.revocations import CRL, Revocations
from megatron_mux.split.protocol.wire import METHOD, Kind, Limits, RefusedError
from megatron_mux.split.server.bytes_in_flight import BytesInFlight
from megatron_mux.split.server.stream import ClientStreams, ServerStream
from megatron_mux.split.tls import IDENTITY, read_files, split_address
from megatron_mux.split.tls import ServerTls as ServerTls

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOCAL = "local"
"""Identity of every client without TLS."""

_LONGEST_TEXT = 2000
_MOST_STREAMS = 4096
_MOST_ATTEMPTS = 8  # to find a port that is free at all addresses of a name
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # such as ::1 of localhost where there is no IPv6
SHARE = 4
"""One client may have one part in so many of the bytes in flight."""

_OPTIONS = [
    ("grpc.max_receive_message_length", FRAME_BYTES),
    ("grpc.max_concurrent_streams", 64),  # on one connection
    ("grpc.so_reuseport", 0),  # a second server at the same port is a mistake
    # Clients that are gone without a word, or stopped, are found by pings of the connection.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]

_log = logging.getLogger(__name__)


Send = Callable[[Message], Awaitable[None]]


class Handler(Protocol):
    """What a server does with its clients' messages."""

    def limits(self, identity: str) -> Limits:
        """What a client may send before it has joined.

        Args:
            identity: Common name of the client's verified certificate.
        """
        ...

    async def session(self, identity: str, incoming: ServerStream, send: Send) -> None:
        """Serve one stream until its client ends it; the stream ends when this returns.

        A `RefusedError` is sent to the client as ERROR and ends the stream.

        Args:
            identity: Common name of the client's verified certificate.
            send: Sends a message to the client; waits while the client is slow to read.

        Raises:
            asyncio.CancelledError: The client is gone or broke the protocol, or the service stops.
        """
        ...


class Service:
    """Serves streams of clients.

    Args:
        handler: Serves each stream.
        address: `HOST:PORT` to listen on; port 0 takes a free one.
        tls: Files of the server; None (tests only, on 127.0.0.1): no encryption, and every client is called `local`.
        max_bytes_in_flight: Most bytes of all clients' messages that are being received or handled. Beyond, reading
            pauses. One client may have a quarter of them; a message that is larger is refused.
        most_streams_each: Of one client: its sessions, and streams that have broken and are not noticed yet.

    Attributes:
        port: The port, once started.
        in_flight: Bytes that are taken and free, and counts of those received and sent.
    """

    port: int

    def __init__(
        self,
        handler: Handler,
        address: str,
        tls: ServerTls | None,
        max_bytes_in_flight: int = 1 << 30,
        most_streams_each: int = 128,
    ) -> None:
        self._handler = handler
        self._most_streams_each = most_streams_each
        self._address = address
        self._tls = tls
        self.in_flight = BytesInFlight(max_bytes_in_flight)
        self._clients: WeakValueDictionary[str, ClientStreams] = WeakValueDictionary()
        self._revocations: Revocations | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            UserError: The address cannot be listened on, or files are unusable.
        """
        name = METHOD.strip("/").split("/")
        method = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MOST_STREAMS)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name[0], {name[1]: method})]
        )
        host, _ = split_address(self._address)
        try:
            addresses = _free_addresses(self._address)
            if self._tls is not None:
                ca, certificate, key = read_files(self._tls.client_ca, self._tls.certificate, self._tls.key)
                crl = self._tls.client_crl or self._tls.client_ca.with_name(CRL)
                self._revocations = Revocations(crl, self._tls.client_ca)
                credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
                ports = [self._server.add_secure_port(address, credentials) for address in addresses]
            elif host in _LOOPBACK:
                ports = [self._server.add_insecure_port(address) for address in addresses]
            else:
                raise UserError(f"--listen {self._address}: without TLS, a server listens on 127.0.0.1 only")
        except (OSError, RuntimeError):
            raise UserError(
                f"--listen {self._address}: the port is taken, or the address is not this machine's"
            ) from None
        self.port = ports[0]
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Accept no more streams, and cancel those that have not ended after `grace` seconds."""
        await self._server.stop(grace)

    async def _serve(self, requests: object, context: Any) -> None:
        """Serve one stream."""
        identity = _LOCAL if self._tls is None else _identity(context)
        if identity is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "The certificate's common name is no identity."
            )
            return
        share = self.in_flight.most // SHARE
        client = self._clients.setdefault(identity, ClientStreams(share))
        if client.count >= self._most_streams_each:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "The client has too many streams.")
            return
        client.count += 1
        stream = ServerStream(context, self._handler.limits(identity), self.in_flight, client)
        error: RefusedError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                beside = stream.receive_all(), stream.show_life(), self._check_revocations(context, identity)
                tasks = [group.create_task(work) for work in beside]
                await self._handler.session(identity, stream, stream.send)
                for task in tasks:
                    task.cancel()
        except* RefusedError as refused:
            error = _first(refused)
        except* Exception as refused:
            _log.error("a stream of %s failed", identity, exc_info=refused)
            error = RefusedError("internal", "The server failed; its log says why.")
        finally:
            stream.release()
            client.count -= 1
        if error is not None:
            fields = Refusal(code=error.code, message=str(error)[:_LONGEST_TEXT], retry=error.retry)
            await stream.send(Message(Kind.ERROR, fields=fields))

    async def _check_revocations(self, context: Any, identity: str) -> None:
        """Raise `RefusedError` once the certificate of a stream's client has been revoked."""
        if self._revocations is None:
            return
        (certificate,) = context.auth_context()["x509_pem_cert"]
        await self._revocations.wait_for(x509.load_pem_x509_certificate(certificate).serial_number)
        _log.warning("a stream of %s ends: its certificate was revoked", identity)
        raise RefusedError("revoked", "the client's certificate was revoked: ask for another one")


def _free_addresses(address: str) -> list[str]:
    """All addresses of a name, with one port that is free at each of them.

    gRPC is content with one of a name's addresses, and its clients may then meet another process at the next.

    Raises:
        OSError: The port is taken at one of them, or none of them is this machine's.
    """
    host, port = split_address(address)
    for _ in range(_MOST_ATTEMPTS if port == 0 else 0):
        with suppress(OSError):  # another process has the port at another address
            return _bindable(host, port)
    return _bindable(host, port)


def _bindable(host: str, port: int) -> list[str]:
    """`ADDRESS:PORT` of a name's addresses that are this machine's; see `_free_addresses`."""
    failure: OSError | None = None
    addresses = dict[str, None]()
    with ExitStack() as held:
        for family, kind, *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                bound = held.enter_context(socket.socket(family, kind))
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind((place[0], port, *place[2:]))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                failure = error
                continue
            port = bound.getsockname()[1]
            addresses[f"[{place[0]}]:{port}" if family == socket.AF_INET6 else f"{place[0]}:{port}"] = None
    if failure is not None and not addresses:
        raise failure
    return list(addresses)


def _identity(context: Any) -> str | None:
    """The common name of the client's verified certificate, if it is one usable name."""
    names = [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", ())]
    return names[0] if len(names) == 1 and IDENTITY.fullmatch(names[0]) else None


def _first(group: ExceptionGroup[RefusedError]) -> RefusedError:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RefusedError)
    return error
