"""A service that answers over HTTP, with instances that speak the channel and say what a test has them say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from openai import AsyncOpenAI

from megatron_mux.serve.api.app import create_app
from megatron_mux.serve.channel.hub import Hub
from megatron_mux.serve.channel.messages import (
    Complete,
    Hello,
    Message,
    Piece,
    Welcome,
    read_command,
)
from megatron_mux.serve.completions import Completions
from megatron_mux.serve.control.reports import JobRecords
from megatron_mux.serve.database.ids import hash_of
from megatron_mux.serve.database.tables import Instance
from tests.unit.serve.api.world import World, make_world

ASK: list[Any] = [{"role": "user", "content": "Hi"}]


@dataclass
class FakeInstance:
    """Connected to the server's hub."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def say(self, *messages: Message) -> None:
        self.writer.write(b"".join(message.line() for message in messages))

    async def heard(self) -> Any:
        return read_command(await asyncio.wait_for(self.reader.readline(), 10))

    async def asked(self) -> Complete:
        """The completion that it is given."""
        command = await self.heard()
        assert isinstance(command, Complete)
        return command


@dataclass
class Scene:
    """A service that answers over HTTP, and what the dispatcher has been told."""

    world: World
    hub: Hub
    url: str = ""
    wanted: list[str] = field(default_factory=list)
    clients: list[AsyncOpenAI] = field(default_factory=list)

    def client(self, tenant: str = "ann") -> AsyncOpenAI:
        key = self.world.key(tenant)
        self.clients.append(AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0))
        return self.clients[-1]

    @property
    def address(self) -> Path:
        return self.world.service.settings.state / "socket"

    def add(self, name: str, backbone: str = "tiny", state: str = "ready") -> None:
        """An instance as the control loop keeps it."""
        row = Instance(
            name=name,
            slot=0,
            backbone=backbone,
            state=state,
            token_hash=hash_of("secret"),
            handle={},
            started_at=1.0,
        )
        with self.world.service.store.write() as session:
            session.add(row)

    @asynccontextmanager
    async def instance(self, name: str = "0.0", **row: str) -> AsyncIterator[FakeInstance]:
        await asyncio.to_thread(lambda: self.add(name, **row))
        own = FakeInstance(*await asyncio.open_unix_connection(self.address))
        own.say(Hello(instance=name, token="secret"))
        assert isinstance(await own.heard(), Welcome)
        try:
            yield own
        finally:
            own.writer.close()


def play(directory: Path, act: Callable[[Scene], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Do something with a service."""

    async def run() -> None:
        world = make_world(directory, **limits)
        service = world.service
        scene = Scene(world, Hub(JobRecords(service.store, directory), lambda: None))
        await scene.hub.start(scene.address)
        service.completions = Completions(scene.hub, service.store, scene.wanted.append, service.wake)
        config = uvicorn.Config(create_app(service), port=0, lifespan="off", log_level="warning")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        scene.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
        try:
            await act(scene)
            await until(lambda: not any(service.completing.values()))
        finally:
            for client in scene.clients:
                await client.close()
            await scene.hub.close()
            server.should_exit = True
            await serving
            service.store.close()

    asyncio.run(run())


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def piece(own: str, text: str = "", choice: int = 0, **more: Any) -> Piece:
    more = {"prompt_tokens": 7, "completion_tokens": 1, **more}
    return Piece(id=own, choice=choice, text=text, **more)


def ask(client: AsyncOpenAI, **fields: Any) -> asyncio.Task[Any]:
    fields = {"model": "tiny", "messages": ASK, **fields}
    return asyncio.ensure_future(client.chat.completions.create(**fields))
