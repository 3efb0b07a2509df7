"""The JSON of what sessions ask for, validated: the server trusts none of it."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_mux.split.protocol.wire import Message, RefusedError

_MOST_KEPT = 16
"""Saves that a client may have the server keep."""


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


T = TypeVar("T", bound=_Fields)


class Decision(_Fields):
    """What became of an optimizer step, as the client decides for both ends."""

    step: Annotated[int, Field(ge=0)]
    """Steps done before it."""
    norm: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Norm of the gradient over both ends."""
    skip: bool = False
    """Whether neither end steps."""


class ForwardFields(_Fields):
    """JSON of a FORWARD."""

    lengths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    """Tokens of each sequence, in the order of the rows."""
    ids: list[Annotated[int, Field(ge=0, le=2**31 - 1)]]
    """Number of each sequence among those of its optimizer step."""
    previous: Decision | None = None
    """The step before, if the server has not been told of it."""


class BackwardFields(_Fields):
    """JSON of a BACKWARD."""

    forward: Annotated[int, Field(ge=0)]
    """The operation of its forward pass."""


class StateFields(_Fields):
    """JSON of a STATE."""

    keep: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MOST_KEPT)] = []
    """Steps of other saves that the client needs."""
    first: Annotated[int, Field(ge=0)] = 0
    """Number of pieces that the client has: with 0 the state is saved, then it is sent from there on."""
    previous: Decision | None = None
    """As of a FORWARD."""


class LeaveFields(_Fields):
    """JSON of a LEAVE."""

    finished: bool = False
    """Whether the task is done: what the server keeps of it gets a name."""
    previous: Decision | None = None
    """As of a FORWARD."""


def parse(model: type[T], message: Message) -> T:
    """The JSON of a message, validated.

    Raises:
        RefusedError: It is not what the kind of message has.
    """
    try:
        return model.model_validate(dict(message.fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RefusedError("json", f"{message.kind.name}: {where}: {first['msg']}") from None
