"""The route of chat completions: backbones and tuned models continue conversations, at once or as a stream."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from sqlalchemy import or_, select
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from megatron_mux.section import problem
from megatron_mux.serve.api.access import Caller, CallerOf, ServiceOf
from megatron_mux.serve.api.bodies import read_json
from megatron_mux.serve.api.errors import ApiError, missing
from megatron_mux.serve.api.objects import choice_object, fingerprint, usage_object
from megatron_mux.serve.channel.messages import Broken, Complete, Piece, TokenLogProb
from megatron_mux.serve.control.reports import model_name
from megatron_mux.serve.database.ids import new_id
from megatron_mux.serve.database.tables import Checkpoint, Job
from megatron_mux.serve.service import Service

router = APIRouter(prefix="/chat/completions")
_SECONDS_BETWEEN_LOOKS = 0.5
"""At whether a client is still there."""
_RETRY_AFTER = "5"
"""Seconds."""
_NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "tools": [],
}
"""Values of fields that are not offered which ask for nothing; some clients always send them."""
_CHECKPOINT = re.compile(r"(.+):ckpt-step-([0-9]{1,15})", re.DOTALL)

T = TypeVar("T")
Count = Annotated[int, Field(ge=1)]


def _joined(content: Any) -> Any:
    """The text of a message that is given in parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        is_text = isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
        if not is_text or not isinstance(part["text"], str):
            raise problem('each part must be a text: {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in content)


class _Body(BaseModel):
    """An object of a request; what is null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: own for key, own in value.items() if own is not None}


class ChatMessage(_Body):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined)]


class StreamOptions(_Body):
    """How to stream."""

    include_usage: bool = False


class ChatRequest(_Body):
    """What `POST /chat/completions` asks for.

    Attributes:
        model: A backbone, a tuned model, or a checkpoint of a job.
        top_k: Of our own.
        seed: None: the server draws one.
        user, metadata, store: Accepted, and without effect.
    """

    # Postgres has no text with NUL.
    model: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00]*$")]
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count | None = None
    n: Annotated[int, Field(ge=1, le=8)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=4),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: own for key, own in value.items() if key not in _NEUTRAL or own != _NEUTRAL[key]}

    @field_validator("max_completion_tokens")
    @classmethod
    def _is_the_only_one(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens") is not None:
            raise problem("is given by max_tokens too: leave one out")
        return value

    @field_validator("top_logprobs", "stream_options")
    @classmethod
    def _has_its_switch(cls, value: Any, info: ValidationInfo) -> Any:
        switch = "logprobs" if info.field_name == "top_logprobs" else "stream"
        if value is not None and not info.data.get(switch, True):
            raise problem(f"needs {switch}: true")
        return value

    def command(self, adapter: str) -> Complete:
        """The same for an instance."""
        roles = {"developer": "system"}
        return Complete(
            id=new_id("chatcmpl"),
            adapter=adapter,
            messages=[
                {"role": roles.get(own.role, own.role), "content": own.content} for own in self.messages
            ],
            choices=self.n,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=secrets.randbelow(2**31) if self.seed is None else self.seed,
            stop=self.stop,
            top_log_probs=(self.top_logprobs or 0) if self.logprobs else None,
        )


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
        ApiError: 400: an instance cannot do what is asked; 429: the tenant has too many; 503: it broke off.
    """
    open_now, own, most = service.completing, caller.tenant_id, caller.limits.open_completions
    if open_now[own] >= most:
        raise ApiError(429, f"{most} completions are in progress: wait.", code="rate_limit_exceeded")
    open_now[own] += 1
    try:
        async with aclosing(service.completions.pieces(backbone, command)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Broken):
                    raise _error(piece)
                yield piece
    finally:
        open_now[own] -= 1


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
