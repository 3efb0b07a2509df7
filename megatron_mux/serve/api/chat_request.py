"""What a client asks for in a chat."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megatron_mux.section import problem
from megatron_mux.serve.channel.messages import Complete
from megatron_mux.serve.database.ids import new_id

_NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "tools": [],
}
"""Values of fields that are not offered which ask for nothing; some clients always send them."""

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
    top_k: Annotated[int, Field(ge=1, le=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=8)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]],
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
