from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from megatron_mux.serve.api import http_protocol
from megatron_mux.serve.api.http_protocol import HttpProtocol

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.4)  # longer than a head may take
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(5):
        return await reader.read() == b""


async def exchange() -> None:
    config, state = Config(answer, ws="none", lifespan="off"), ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    silent, _ = await asyncio.open_connection("127.0.0.1", port)
    dribbled, slow = await asyncio.open_connection("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    slow.write(GET)
    writer.write(GET + b"\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204"), (
        "an answer takes as long as it takes"
    )
    assert await closed(silent) and await closed(dribbled)
    await asyncio.sleep(0.3)
    writer.write(GET)  # on a connection that has been idle since, for which there is another limit
    assert await closed(reader)
    server.close()


def test_a_head_that_does_not_come_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_SECONDS", 0.2)
    asyncio.run(exchange())
