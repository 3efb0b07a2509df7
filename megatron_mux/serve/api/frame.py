"""What every request goes through: its host, the time its body takes, and the last resort for errors."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_mux.serve.api.errors import ApiError, respond
from megatron_mux.serve.settings import Settings

_SECONDS_BETWEEN_CHUNKS = 30
_SECONDS_TO_DISCARD = 5
_LOG = logging.getLogger(__name__)


class Frame:
    """Around an application: refuses unknown hosts, names each request, and answers for an application that fails.

    A page of another site can have a browser send requests to a name that it points at this server; the header `Host`
    then has that name.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        named = {settings.host, "localhost", "127.0.0.1", "::1", *settings.hosts}
        self._hosts = {name.lower().strip("[]") for name in named}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as any ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        try:
            refusal = self._refusal(scope)
            handler = self._app if refusal is None else respond(refusal)
            await handler(scope, exchange.receive, exchange.send)
        except Exception:
            _LOG.exception("%s: %s %r failed", exchange.id, scope["method"], scope["path"])
            if exchange.started:
                raise
            error = ApiError(500, f"The server failed; see {exchange.id} in its log.", type="server_error")
            await respond(error)(scope, exchange.receive, exchange.send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        host = _without_port(Headers(scope=scope).get("host", ""))
        if host not in self._hosts:
            return ApiError(400, f"This server is not known as {host[:255]!r}.", code="unknown_host")
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:  # Postgres has no text with NUL
            return ApiError(400, "The URL has a NUL character.")
        return None


class _Exchange:
    """A request and its answer.

    Attributes:
        id: For the log, and for the client.
        started: Whether the answer has begun.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self.id = f"req_{secrets.token_hex(12)}"
        self.started = False
        self._receive, self._send = receive, send
        self._whole = False

    async def receive(self) -> Message:
        """See ASGI.

        Raises:
            ApiError: 408: nothing has come for too long, though the body is not complete.
        """
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout(_SECONDS_BETWEEN_CHUNKS):
                message = await self._receive()
        except TimeoutError:
            self._whole = True  # nothing else will be read
            raise ApiError(408, "The body came too slowly.", code="timeout", retry=False) from None
        self._whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """See ASGI. A client that still sends when the connection is closed would not see that it is refused."""
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            headers["x-content-type-options"] = "nosniff"
            if message["status"] >= 400:
                with suppress(TimeoutError, ApiError):
                    async with asyncio.timeout(_SECONDS_TO_DISCARD):
                        while not self._whole:
                            await self.receive()
        await self._send(message)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
