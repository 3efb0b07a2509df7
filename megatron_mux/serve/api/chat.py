"""The route of chat completions: backbones and tuned models continue conversations, at once or as a stream."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sqlalchemy import or_, select
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from megatron_mux.serve.api.access import Caller, CallerOf, ServiceOf, check_key
from megatron_mux.serve.api.bodies import read_json
from megatron_mux.serve.api.chat_request import ChatRequest
from megatron_mux.serve.api.errors import ApiError, missing
from megatron_mux.serve.api.objects import choice_object, fingerprint, usage_object
from megatron_mux.serve.channel.messages import Broken, Complete, Piece, TokenLogProb
from megatron_mux.serve.control.reports import model_name
from megatron_mux.serve.database.tables import Checkpoint, Job
from megatron_mux.serve.service import Service

router = APIRouter(prefix="/chat/completions")
_SECONDS_BETWEEN_LOOKS = 0.5
"""At whether a client is still there, and its key good."""
_RETRY_AFTER = "5"
"""Seconds."""
_CHECKPOINT = re.compile(r"(.+):ckpt-step-([0-9]{1,15})", re.DOTALL)

T = TypeVar("T")


@router.post("")
async def create(request: Request, service: ServiceOf, caller: CallerOf) -> Response:
    """Continue a conversation."""
    chat = await read_json(request, ChatRequest, caller.limits.body_bytes)
    backbone, adapter = await asyncio.to_thread(_find, service, caller, chat.model)
    command = chat.command(adapter)
    head = {
        "id": command.id,
        "created": int(time.time()),
        "model": chat.model,
        "service_tier": "default",
        "system_fingerprint": fingerprint(backbone, adapter),
    }
    pieces = _pieces(service, caller, backbone, command)
    if not chat.stream:
        return JSONResponse({**head, **await _unless_left(request, _whole(pieces, command))})
    first = await _unless_left(request, anext(pieces))
    with_usage = chat.stream_options is not None and chat.stream_options.include_usage
    return _Stream(pieces, _events(_after(first, pieces), command, head, with_usage))


def _find(service: Service, caller: Caller, name: str) -> tuple[str, str]:
    """The backbone of a model, and the directory of its adapter; empty: it has none.

    Raises:
        ApiError: 404: it does not exist, is another tenant's, or its backbone is not served.
    """
    if name in service.settings.backbones:
        return name, ""
    with service.store.read() as session:
        found = _tuned(session, caller, name)
    if found is None:
        raise missing("model", name, "model")
    if found[0] not in service.settings.backbones:
        text = f"This server does not have {found[0]!r}, of which {name!r} was tuned."
        raise ApiError(404, text, "model", "not_found")
    return found


def _tuned(session: Session, caller: Caller, name: str) -> tuple[str, str] | None:
    """The backbone and the adapter of a tenant's model or checkpoint."""
    own = select(Job).where(Job.tenant_id == caller.tenant_id)
    job = session.scalar(own.where(Job.model == name, Job.status == "succeeded", Job.checkpoint != ""))
    if job is not None:
        return job.backbone, job.checkpoint
    parts = _CHECKPOINT.fullmatch(name)
    if parts is None:
        return None
    model, step = parts[1], int(parts[2])
    # The names of models end with the beginning of their job's id.
    begins = Job.id.startswith(f"ftjob-{model.rpartition(':')[2]}", autoescape=True)
    found = session.execute(
        own.add_columns(Checkpoint.path)
        .join(Checkpoint, Checkpoint.job_id == Job.id)
        .where(Checkpoint.step == step, or_(Job.model == model, begins))
        .order_by(Checkpoint.created_at.desc())
    )
    for job, path in found:
        if (job.model or model_name(job, caller.tenant_name)) == model:
            return job.backbone, path
    return None


async def _pieces(
    service: Service, caller: Caller, backbone: str, command: Complete
) -> AsyncGenerator[Piece | None, None]:
    """Yield what comes of a completion, and None if nothing has come for long.

    Raises:
        ApiError: 400: an instance cannot do what is asked; 401: the key is good no more; 429: the tenant has too many;
            503: it broke off.
    """
    open_now, own, most = service.completing, caller.tenant_id, caller.limits.open_completions
    if open_now[own] >= most:
        raise ApiError(429, f"{most} completions are in progress: wait.", code="rate_limit_exceeded")
    open_now[own] += 1
    try:
        pieces = service.completions.pieces(backbone, command)
        async with aclosing(_while_good(pieces, partial(check_key, service, caller))) as good:
            async for piece in good:
                if isinstance(piece, Broken):
                    raise _error(piece)
                yield piece
    finally:
        open_now[own] -= 1


async def _while_good(pieces: AsyncGenerator[T, None], check: Callable[[], None]) -> AsyncGenerator[T, None]:
    """Yield pieces while a check that is made every half a second raises nothing; closes them in the end."""
    due = time.monotonic() + _SECONDS_BETWEEN_LOOKS
    async with aclosing(pieces):
        ended = object()
        coming = asyncio.ensure_future(anext(pieces, ended))
        try:
            while True:
                await asyncio.wait({coming}, timeout=max(0.0, due - time.monotonic()))
                if time.monotonic() >= due:
                    await asyncio.to_thread(check)
                    due = time.monotonic() + _SECONDS_BETWEEN_LOOKS
                if coming.done():
                    if (piece := coming.result()) is ended:
                        return
                    yield piece  # type: ignore[misc]
                    coming = asyncio.ensure_future(anext(pieces, ended))
        finally:
            coming.cancel()
            await asyncio.wait({coming})


def _error(broken: Broken) -> ApiError:
    if broken.is_clients:
        return ApiError(400, broken.message, broken.param, broken.code)
    error = ApiError(503, broken.message, broken.param, broken.code, type="server_error")
    error.headers["retry-after"] = _RETRY_AFTER
    return error


async def _unless_left(request: Request, work: Awaitable[T]) -> T:
    """Wait for something while the client is there.

    Raises:
        ClientDisconnect: It has left.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_SECONDS_BETWEEN_LOOKS)
            if not task.done() and await request.is_disconnected():
                raise ClientDisconnect
    finally:
        task.cancel()
        await asyncio.wait({task})
    return await task


@dataclass
class _Tokens:
    """Counts the tokens of a completion."""

    prompt: int = 0
    of_choices: dict[int, int] = field(default_factory=dict)

    def count(self, piece: Piece) -> None:
        self.prompt = piece.prompt_tokens
        self.of_choices[piece.choice] = piece.completion_tokens

    def usage(self) -> dict[str, Any]:
        return usage_object(self.prompt, sum(self.of_choices.values()))


async def _whole(pieces: AsyncGenerator[Piece | None, None], command: Complete) -> dict[str, Any]:
    """What is not known of an answer before it is complete."""
    tokens = _Tokens()
    texts: list[list[str]] = [[] for _ in range(command.choices)]
    log_probs: list[list[TokenLogProb]] = [[] for _ in texts]
    ends: list[str | None] = [None for _ in texts]
    async with aclosing(pieces):
        async for piece in pieces:
            if piece is None:
                continue
            tokens.count(piece)
            texts[piece.choice].append(piece.text)
            log_probs[piece.choice] += piece.log_probs
            ends[piece.choice] = piece.finish
    choices = [
        choice_object(
            index,
            {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
            None if command.top_log_probs is None else log_probs[index],
            ends[index],
        )
        for index in range(command.choices)
    ]
    return {"object": "chat.completion", "choices": choices, "usage": tokens.usage()}


async def _after(
    first: Piece | None, others: AsyncGenerator[Piece | None, None]
) -> AsyncGenerator[Piece | None, None]:
    yield first
    async for piece in others:
        yield piece


async def _events(
    pieces: AsyncGenerator[Piece | None, None], command: Complete, head: Mapping[str, Any], with_usage: bool
) -> AsyncGenerator[str, None]:
    """The events of a stream. What goes wrong is one of them, as the status has been sent."""
    tokens = _Tokens()

    def chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        content = {**head, "object": "chat.completion.chunk", "choices": choices}
        return _event({**content, "usage": usage} if with_usage else content)

    for index in range(command.choices):
        begin = {"role": "assistant", "content": "", "refusal": None}
        yield chunk([choice_object(index, begin, None, None, "delta")])
    try:
        async for piece in pieces:
            if piece is None:
                yield ": \n\n"  # a comment, so that nobody takes the connection for dead
                continue
            tokens.count(piece)
            if piece.text or piece.log_probs:
                log_probs = None if command.top_log_probs is None else piece.log_probs
                yield chunk([choice_object(piece.choice, {"content": piece.text}, log_probs, None, "delta")])
            if piece.finish is not None:
                yield chunk([choice_object(piece.choice, {}, None, piece.finish, "delta")])
    except ApiError as error:
        yield _event({"error": error.error})
        return
    if with_usage:
        yield chunk([], tokens.usage())
    yield "data: [DONE]\n\n"


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _Stream(StreamingResponse):
    """Sends events, and closes the pieces that they are made of however it ends."""

    def __init__(self, pieces: AsyncGenerator[Piece | None, None], events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()
