from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.serve.api import frame
from tests.unit.serve.api.world import World


async def exchange(world: World, body: AsyncIterator[bytes], **headers: str) -> int:
    """Send a request, chunk by chunk as `body` yields them and for ever; returns the status of the answer."""
    sent = list[Any]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": await anext(body), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    named = {"host": "localhost", "authorization": f"Bearer {world.key(str(headers))}", **headers}
    scope = {
        "type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "root_path": "",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()],
    }  # fmt: skip
    await world.http.app(scope, receive, send)
    return int(sent[0]["status"])


async def dribble() -> AsyncIterator[bytes]:
    yield b"--x\r\n"
    await asyncio.sleep(60)


async def flood() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(0)
        yield b"x" * 1000


def test_a_body_that_comes_too_slowly_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frame, "_SECONDS_BETWEEN_CHUNKS", 0.05)
    form = "multipart/form-data; boundary=x"
    assert asyncio.run(exchange(world, dribble(), content_type=form)) == 408
    assert not list((tmp_path / "files").glob("*"))


def test_a_client_that_is_refused_is_heard_for_a_moment(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "_SECONDS_TO_DISCARD", 0.05)
    assert asyncio.run(exchange(world, flood(), authorization="")) == 401
    assert asyncio.run(exchange(world, flood(), host="evil.example")) == 400


def test_uploads_at_the_same_time_are_bounded(world: World) -> None:
    headers = {"authorization": f"Bearer {world.key('ann')}"}
    assert world.http.post("/v1/files", headers=headers, content=b"{}").status_code == 400
    (tenant,) = world.service.receiving
    world.service.receiving[tenant] = 16
    assert world.http.post("/v1/files", headers=headers, files={"file": b"a"}).status_code == 429
