"""Which instance continues a conversation, and what happens when it, or the client, goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select
from starlette.requests import ClientDisconnect

from megatron_mux.serve.api import chat
from megatron_mux.serve.channel.messages import (
    Abandon,
    Broken,
    Complete,
    Piece,
)
from megatron_mux.serve.control import observed
from megatron_mux.serve.control.observed import Observed
from megatron_mux.serve.database.tables import Instance, Key, Tenant
from megatron_mux.serve.keys import revoke_key
from tests.unit.serve.api.chats import ASK, Scene, ask, piece, play, until


@pytest.mark.parametrize("stream", [False, True])
def test_what_breaks_off_before_it_began_is_an_error(tmp_path: Path, stream: bool) -> None:
    async def act(scene: Scene) -> None:
        async with scene.instance() as instance:
            client = scene.client()
            asking = ask(client, stream=stream)
            own = (await instance.asked()).id
            instance.say(Broken(id=own, message="too long", param="messages", code="long", is_clients=True))
            with pytest.raises(openai.BadRequestError, match="too long") as wrong:
                await asking
            assert (wrong.value.param, wrong.value.code) == ("messages", "long")
            asking = ask(client, stream=stream)
            instance.say(Broken(id=(await instance.asked()).id, message="no memory"))
            with pytest.raises(openai.InternalServerError, match="no memory") as failed:
                await asking
            assert failed.value.status_code == 503 and failed.value.type == "server_error"
            assert int(failed.value.response.headers["retry-after"]) > 0
            asking = ask(client, stream=stream)
            await instance.asked()
            instance.writer.close()
            with pytest.raises(openai.InternalServerError, match="its instance went away"):
                await asking

    play(tmp_path, act)


def test_what_breaks_off_within_a_stream_is_its_last_event(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        async with scene.instance() as instance:
            asking = ask(scene.client(), stream=True, stream_options={"include_usage": True})
            own = (await instance.asked()).id
            instance.say(piece(own, "a"))
            stream = await asking
            instance.say(Broken(id=own, message="no memory", code="memory"))
            got = []
            with pytest.raises(openai.APIError, match="no memory") as broken:
                async for part in stream:
                    got.append(part)
            assert len(got) == 2 and broken.value.code == "memory" and broken.value.type == "server_error"

    play(tmp_path, act)


@pytest.mark.parametrize("when", ["whole", "whole, begun", "stream", "stream, begun"])
def test_when_the_client_leaves_the_instance_is_told(tmp_path: Path, when: str) -> None:
    async def act(scene: Scene) -> None:
        service = scene.world.service
        async with scene.instance() as instance:
            asking = ask(scene.client(), stream=when.startswith("stream"))
            own = (await instance.asked()).id
            if when.endswith("begun"):
                instance.say(piece(own, "a"))
            if when == "stream, begun":
                await (await asking).close()
            else:
                await asyncio.sleep(0.1)
                asking.cancel()
            assert await instance.heard() == Abandon(id=own)
            await until(lambda: not any(service.completing.values()))
            assert not scene.hub.peers["0.0"].completions

    play(tmp_path, act)


def test_a_client_that_leaves_before_there_is_an_instance_is_forgotten(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        asking = ask(scene.client())
        await until(lambda: bool(scene.world.woken))
        asking.cancel()
        await until(lambda: not any(scene.world.service.completing.values()))

    play(tmp_path, act)


def test_a_tenant_has_so_many_at_once(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        ann, bob = scene.client("ann"), scene.client("bob")
        async with scene.instance() as instance:
            asking = [ask(ann, stream=own) for own in (True, False)]
            first = [(await instance.asked()).id for _ in asking]
            with pytest.raises(openai.RateLimitError, match="2 completions are in progress"):
                await ask(ann)
            other = ask(bob)
            instance.say(piece((await instance.asked()).id, finish="stop"))
            assert (await other).choices
            instance.say(*(piece(own, finish="stop") for own in first))
            stream, _ = await asyncio.gather(*asking)
            assert len([own async for own in stream]) == 2
            await until(lambda: not any(scene.world.service.completing.values()))
            again = ask(ann)
            instance.say(piece((await instance.asked()).id, finish="stop"))
            await again

    play(tmp_path, act, open_completions=2)


def test_a_backbone_without_an_instance_is_wanted_and_the_request_waits(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        async with scene.instance("1.0", backbone="other"), scene.instance("2.0", state="draining"):
            await asyncio.to_thread(lambda: scene.add("3.0"))  # ready, but not connected
            asking = ask(scene.client())
            await until(lambda: bool(scene.world.woken))
            assert scene.wanted == ["tiny"]
            async with scene.instance("0.0") as instance:
                instance.say(piece((await instance.asked()).id, "a", finish="stop"))
                assert (await asking).choices[0].message.content == "a"
            await until(lambda: "0.0" not in scene.hub.peers)
            scene.world.service.completions.seconds_to_wait = 0.01
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError, match="No instance has tiny") as failed:
                    await ask(scene.client(f"tenant {stream}"), stream=stream)
                assert failed.value.status_code == 503 and failed.value.code == "no_instance"
                assert int(failed.value.response.headers["retry-after"]) > 0

    play(tmp_path, act)


def test_the_instance_with_the_fewest_gets_the_next(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        client = scene.client()
        async with scene.instance("0.0") as first, scene.instance("1.0") as second:
            asking = [ask(client) for _ in range(4)]
            given = [(own, (await own.asked()).id) for own in (first, first, second, second)]
            given[2][0].say(piece(given[2][1], finish="stop"))
            await until(lambda: len(scene.hub.peers["1.0"].completions) == 1)
            asking.append(ask(client))
            given[2] = (second, (await second.asked()).id)
            for own, completion in given:
                own.say(piece(completion, finish="stop"))
            await asyncio.gather(*asking)

    play(tmp_path, act)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_key_that_is_revoked_ends_its_streams(tmp_path: Path, is_silent: bool) -> None:
    async def act(scene: Scene) -> None:
        ann, store = scene.client("ann"), scene.world.service.store
        async with scene.instance() as instance:
            streaming = ask(ann, stream=True)
            own = (await instance.asked()).id
            instance.say(piece(own, "a"))
            stream = await streaming
            with store.read() as session:
                tenant = session.scalars(select(Tenant.id).where(Tenant.name == "ann")).one()
                key = session.scalars(select(Key.id).where(Key.tenant_id == tenant)).one()
            revoke_key(store, key)
            began = time.monotonic()

            async def speak() -> None:
                while not is_silent:
                    instance.say(piece(own, "b"))
                    await asyncio.sleep(0.01)

            speaking = asyncio.ensure_future(speak())
            with pytest.raises(openai.APIError, match="revoked"):
                async for _ in stream:
                    pass
            speaking.cancel()
            assert time.monotonic() - began < 1.5
            heard = await instance.heard()
            assert isinstance(heard, Abandon) and heard.id == own

    play(tmp_path, act)


def test_a_silent_stream_is_kept_alive(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.world.service.completions.seconds_of_silence = 0.05
        headers = {"authorization": f"Bearer {scene.world.key('ann')}"}
        body = {"model": "tiny", "messages": ASK, "stream": True}
        async with (
            scene.instance() as instance,
            httpx.AsyncClient(base_url=scene.url, headers=headers) as http,
        ):
            async with http.stream("POST", "/chat/completions", json=body) as answer:
                own = (await instance.asked()).id
                lines = answer.aiter_lines()
                while await anext(lines) != ": ":
                    pass
                instance.say(piece(own, "a", finish="stop"))
                assert '"content": "a"' in "\n".join([line async for line in lines])
            client = scene.client("bob")  # a whole answer has no room for comments
            answering = ask(client)
            own = (await instance.asked()).id
            await asyncio.sleep(0.15)
            instance.say(piece(own, "a", finish="stop"))
            assert (await answering).choices[0].message.content == "a"

    play(tmp_path, act)


def test_a_backbone_is_wanted_for_a_while_and_an_instance_that_answers_is_not_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(scene: Scene) -> None:
        followed = Observed(scene.world.service.settings)

        def seen() -> tuple[bool, list[bool]]:
            with scene.world.service.store.read() as session:
                instances = session.scalars(select(Instance)).all()
                cluster = followed.cluster(session, instances, scene.hub.peers)
            (backbone,) = cluster.backbones
            return backbone.wanted, [own.idle_since is not None for own in cluster.instances]

        assert seen() == (False, [])
        followed.want("tiny")
        assert seen() == (True, [])
        monkeypatch.setattr(observed, "_SECONDS_WANTED", 0.0)
        assert seen() == (False, [])
        async with scene.instance():
            assert seen()[1] == [True]
            scene.hub.complete("0.0", Complete(id="1", messages=ASK))
            assert seen()[1] == [False]
            scene.hub.abandon("0.0", "1")
            assert seen()[1] == [True]

    play(tmp_path, act)


def test_a_stream_that_nobody_takes_is_closed_at_once() -> None:
    closed = list[bool]()

    async def pieces() -> AsyncGenerator[Piece | None, None]:
        try:
            while True:
                yield None
        finally:
            closed.append(True)

    async def events() -> AsyncGenerator[str, None]:
        async for _ in own:
            yield "data: x\n\n"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the client has gone")

    async def receive() -> Any:
        raise AssertionError

    async def run() -> None:
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        with pytest.raises(ClientDisconnect):
            await stream(scope, receive, send)
        assert closed, "by itself, not once it is collected as garbage"

    own = pieces()
    stream = chat._Stream(own, events())
    asyncio.run(run())
