"""What chat completions answer, and what instances are asked for."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select

from megatron_mux.serve.channel.messages import (
    Complete,
    LogProb,
    TokenLogProb,
)
from megatron_mux.serve.database.tables import Checkpoint, Job, Tenant
from tests.unit.serve.api.chats import ASK, Scene, ask, piece, play


def test_a_whole_answer_has_every_field_and_the_instance_gets_what_was_asked(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        async with scene.instance() as instance:
            conversation = [
                {"role": "developer", "content": "Be terse."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Hé"}, {"type": "text", "text": "llo"}],
                },
                {"role": "assistant", "content": "", "refusal": None},
                {"role": "system", "content": "s"},
            ]
            answering = ask(
                scene.client(), messages=conversation, max_completion_tokens=9, temperature=0, top_p=0.5, seed=3,
                stop="END", logprobs=True, top_logprobs=1, user="u", metadata={"a": "b"}, store=True, n=1,
                presence_penalty=0.0, response_format={"type": "text"}, extra_body={"top_k": 4, "tools": []},
            )  # fmt: skip
            asked = await instance.asked()
            assert asked == Complete(
                id=asked.id, choices=1, max_tokens=9, temperature=0.0, top_p=0.5, top_k=4, seed=3, stop=["END"],
                top_log_probs=1,
                messages=[
                    {"role": "system", "content": "Be terse."}, {"role": "user", "content": "Héllo"},
                    {"role": "assistant", "content": ""}, {"role": "system", "content": "s"},
                ],
            )  # fmt: skip
            other = LogProb(token="x", bytes=[120], log_prob=-2.0)
            tokens = [TokenLogProb(token=own, bytes=[97], log_prob=-0.5, top=[other]) for own in "ab"]
            instance.say(piece(asked.id, "a", log_probs=tokens[:1]))
            instance.say(piece(asked.id, "b", log_probs=tokens[1:], completion_tokens=2))
            instance.say(piece(asked.id, "c", finish="stop", completion_tokens=3))
            answer = (await answering).to_dict()
            shown = [
                {
                    "token": own, "logprob": -0.5, "bytes": [97],
                    "top_logprobs": [{"token": "x", "logprob": -2.0, "bytes": [120]}],
                } for own in "ab"
            ]  # fmt: skip
            assert abs(answer.pop("created") - time.time()) < 30 and asked.id.startswith("chatcmpl-")
            prints = answer.pop("system_fingerprint")
            assert prints.startswith("fp_") and len(prints) == 13
            assert answer == {
                "id": asked.id, "object": "chat.completion", "model": "tiny", "service_tier": "default",
                "choices": [{
                    "index": 0, "message": {"role": "assistant", "content": "abc", "refusal": None},
                    "logprobs": {"content": shown, "refusal": None}, "finish_reason": "stop",
                }],
                "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
            }  # fmt: skip
            assert scene.wanted == ["tiny"] and not scene.world.woken

    play(tmp_path, act)


def test_choices_are_kept_apart_and_what_is_left_out_has_defaults(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        async with scene.instance() as instance:
            client, seeds = scene.client(), set[int]()
            for _ in range(3):
                answering = ask(client, n=2, max_tokens=5, stop=["a", "b"])
                asked = await instance.asked()
                seeds.add(asked.seed)
                instance.say(
                    piece(asked.id, "y", 1, completion_tokens=4),
                    piece(asked.id, "x", 0, finish="length", completion_tokens=2),
                    piece(asked.id, "z", 1, finish="stop", completion_tokens=5),
                )
                answer = await answering
                shown = [(own.index, own.message.content, own.finish_reason) for own in answer.choices]
                assert shown == [(0, "x", "length"), (1, "yz", "stop")] and answer.choices[0].logprobs is None
                assert answer.usage.completion_tokens == 7 and answer.usage.prompt_tokens == 7
            defaults = Complete(id=asked.id, messages=ASK, choices=2, max_tokens=5, stop=["a", "b"])
            assert asked == defaults.model_copy(update={"seed": asked.seed}) and len(seeds) == 3

    play(tmp_path, act)


def test_a_stream_has_openais_events(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        async with scene.instance() as instance:
            body = {
                "model": "tiny", "messages": ASK, "n": 2, "stream": True, "logprobs": True,
                "stream_options": {"include_usage": True},
            }  # fmt: skip
            headers = {"authorization": f"Bearer {scene.world.key('ann')}"}
            async with httpx.AsyncClient(base_url=scene.url, headers=headers) as http:
                asking = asyncio.create_task(http.post("/chat/completions", json=body))
                asked = await instance.asked()
                token = TokenLogProb(token="\n", bytes=[10], log_prob=0.0)
                instance.say(
                    piece(asked.id, "\n", 1, log_probs=[token]),
                    piece(asked.id, "", 0, finish="length", completion_tokens=2),
                    piece(asked.id, "b", 1, finish="stop", completion_tokens=3),
                )
                answer = await asking
            assert answer.headers["content-type"].startswith("text/event-stream")
            *events, last, end = answer.text.split("\n\n")
            assert (last, end) == ("data: [DONE]", "") and asked.top_log_probs == 0
            chunks = [json.loads(event.removeprefix("data: ")) for event in events]
            for chunk in chunks:
                assert chunk.pop("created") and chunk.pop("system_fingerprint").startswith("fp_")
                common = (chunk.pop("id"), chunk.pop("object"), chunk.pop("model"), chunk.pop("service_tier"))
                assert common == (asked.id, "chat.completion.chunk", "tiny", "default")

            def choice(index: int, delta: Any, logprobs: Any = None, end: str | None = None) -> Any:
                own = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end}
                return {"choices": [own], "usage": None}

            begin = {"role": "assistant", "content": "", "refusal": None}
            told = {"token": "\n", "bytes": [10], "logprob": 0.0, "top_logprobs": []}
            assert chunks == [
                choice(0, begin), choice(1, begin),
                choice(1, {"content": "\n"}, {"content": [told], "refusal": None}), choice(0, {}, None, "length"),
                choice(1, {"content": "b"}, {"content": [], "refusal": None}), choice(1, {}, None, "stop"),
                {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}},
            ]  # fmt: skip

    play(tmp_path, act)


def test_openais_client_reads_a_stream_as_it_comes(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        async with scene.instance() as instance:
            asking = ask(scene.client(), stream=True)
            asked = await instance.asked()
            instance.say(piece(asked.id, "a"))
            stream = await asking
            parts = [await anext(stream), await anext(stream)]
            assert [own.choices[0].delta.content for own in parts] == ["", "a"]
            instance.say(piece(asked.id, "b", finish="stop"))
            rest = [own async for own in stream]
            assert [own.choices[0].delta.content for own in rest] == ["b", None] and not any(
                "usage" in own.model_fields_set for own in (*parts, *rest)
            )
            assert rest[-1].choices[0].finish_reason == "stop"

    play(tmp_path, act)


def add_job(scene: Scene, tenant: str, model: str | None, **fields: Any) -> Job:
    """A job that has trained."""
    row: dict[str, Any] = {
        "id": "ftjob-12345678aaaa", "created_at": 1.0, "backbone": "tiny", "request": {}, "request_hash": "",
        "task": {}, "answer": {"suffix": "s"}, "model": model, "status": "succeeded",
        "checkpoint": "instances/0.0/checkpoint-9", **fields,
    }  # fmt: skip
    job = Job(tenant_id=tenant, **row)
    with scene.world.service.store.write() as session:
        session.add(job)
        session.flush()
        for own, step in (("a", 4), ("b", 9)):
            path = f"instances/0.0/checkpoint-{step}"
            session.add(Checkpoint(id=f"{job.id}{own}", job_id=job.id, created_at=step, step=step, path=path))
    return job


def test_tuned_models_and_their_checkpoints_are_their_tenants_alone(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        ann, bob = scene.client("ann"), scene.client("bob")
        with scene.world.service.store.read() as session:
            tenant = session.scalars(select(Tenant.id).where(Tenant.name == "ann")).one()
        add_job(scene, tenant, "ft:tiny:ann:s:1")
        add_job(scene, tenant, None, id="ftjob-22222222bbbb", status="running")
        add_job(scene, tenant, "ft:old:ann::2", id="ftjob-3", backbone="old")
        add_job(scene, tenant, "ft:tiny:ann::3", id="ftjob-4", checkpoint="")
        at = {
            "ft:tiny:ann:s:1": 9,
            "ft:tiny:ann:s:1:ckpt-step-4": 4,
            "ft:tiny:ann:s:22222222:ckpt-step-9": 9,
        }
        prints = {}
        async with scene.instance() as instance:
            for model in ("tiny", *at):
                answering = ask(ann, model=model)
                asked = await instance.asked()
                instance.say(piece(asked.id, finish="stop"))
                answer = await answering
                assert asked.adapter == (f"instances/0.0/checkpoint-{at[model]}" if model in at else "")
                assert answer.model == model
                prints[model] = answer.system_fingerprint
            first, second, third, fourth = prints.values()
            assert len({first, second, third}) == 3 and second == fourth, "it names the weights"
        unknown = [
            "none", "ft:tiny:ann:s:22222222", "ft:tiny:ann:s:1:ckpt-step-5", "ft:tiny:ann::3", "tiny:ckpt-step-4",
            "ft:tiny:ann:other:22222222:ckpt-step-9", "ft:old:ann::2", ":ckpt-step-4",
        ]  # fmt: skip
        for client, models in ((ann, unknown), (bob, [*at, *unknown])):
            for model in models:
                with pytest.raises(openai.NotFoundError) as missing:
                    await ask(client, model=model)
                assert (missing.value.param, missing.value.code) == ("model", "not_found")

    play(tmp_path, act)


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "messages": [
            {"role": "tool", "content": "x"}, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            {"role": "user"}, {"role": "assistant", "content": None}, {"role": "user", "content": "x", "name": "y"},
        ],
        "max_tokens": 1, "max_completion_tokens": 2, "temperature": 2.1, "top_p": 0, "top_k": 0, "n": 9,
        "seed": 1.5, "stop": list("abcde"), "top_logprobs": 3, "stream_options": {"include_usage": True},
        "tools": [{"type": "function"}], "response_format": {"type": "json_object"}, "presence_penalty": 1,
        "frequency_penalty": -0.5, "logit_bias": {"1": 2}, "functions": [], "audio": {}, "modalities": ["audio"],
    }  # fmt: skip
    places = {
        "messages.0.role",
        "messages.1.content",
        "messages.2.content",
        "messages.3.content",
        "messages.4.name",
    }

    async def act(scene: Scene) -> None:
        client = scene.client()
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, messages=[], extra_body=wrong)
        found = {fault["param"]: fault["message"] for fault in caught.value.body["faults"]}  # type: ignore[index]
        assert found.keys() == (wrong.keys() | places) - {"messages", "max_tokens"}
        assert found["top_logprobs"] == "top_logprobs: needs logprobs: true"
        assert found["stream_options"] == "stream_options: needs stream: true"
        assert "image" not in found["messages.1.content"] and "must be a text" in found["messages.1.content"]
        single: dict[str, Any]
        for single in (
            {"n": 0}, {"messages": []}, {"top_logprobs": 21, "logprobs": True}, {"stop": ""}, {"temperature": -1},
            {"seed": 2**63}, {"max_tokens": 0}, {"logprobs": 1}, {"top_p": "a"}, {"model": ""}, {"model": "a\0b"},
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, extra_body=single)
            assert str(caught.value.param).split(".")[0] == next(iter(single))
        assert not scene.wanted

    play(tmp_path, act)
