"""What a server and an instance tell each other.

The database says what is to be, so a connection begins with the instance's jobs, and the server makes up the
difference; any command may come twice. A command names the job and the attempt. A report of another attempt than the
database's is refused: whoever sends it came back late. Reports are numbered from 1 on for as long as an instance
lives, kept until they are acknowledged, and committed together with their number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from megatron_mux.version import __version__

TOKEN_VARIABLE = "MEGATRON_MUX_INSTANCE_TOKEN"
"""The environment variable that holds what the server knows an instance by."""

LONGEST = 8 * 2**20
"""Bytes of a message."""

Count = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, Field(min_length=1, max_length=128)]


class Message(BaseModel):
    """Any message."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def line(self) -> bytes:
        """The message as it is sent."""
        return self.model_dump_json().encode() + b"\n"


# -- from the server


class Welcome(Message):
    """The instance is known; it resends reports from the number after `last_report`."""

    kind: Literal["welcome"] = "welcome"
    last_report: Count


class Submit(Message):
    """A job is to train: admitted or refused at once, never queued."""

    kind: Literal["submit"] = "submit"
    job: Name
    attempt: Count
    task: dict[str, Any]
    """As `tasks.yaml` would say it; its name is the job's."""
    continue_from: str = ""
    """Directory of the run whose save it continues; empty: it begins anew."""


class Leave(Message):
    """A job is to be saved and to leave; after `attempt` the instance takes no part of it."""

    kind: Literal["leave"] = "leave"
    job: Name
    attempt: Count


class Complete(Message):
    """A conversation is to be continued. What comes of it is told by `Piece` and `Broken`, which are not kept: a server
    that goes away abandons it."""

    kind: Literal["complete"] = "complete"
    id: Name
    adapter: str = ""
    """Directory of the adapter that continues it, below the service's; empty: the bare backbone."""
    messages: list[dict[str, str]]
    """`role` and `content` of each."""
    choices: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: up to the last position of the backbone."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1, le=2**31)] | None = None
    seed: int = 0
    stop: list[str] = []
    top_log_probs: Annotated[int, Field(ge=0, le=20)] | None = None
    """How many alternatives to each token are told; None: no log-probabilities at all."""


class Abandon(Message):
    """Nobody waits for a completion any more."""

    kind: Literal["abandon"] = "abandon"
    id: Name


class Drain(Message):
    """Every job is to be saved and to leave, and the instance to end."""

    kind: Literal["drain"] = "drain"


class Acknowledge(Message):
    """Reports up to `report` are committed."""

    kind: Literal["acknowledge"] = "acknowledge"
    report: Count


class Refuse(Message):
    """The instance is not welcome and is to end."""

    kind: Literal["refuse"] = "refuse"
    reason: str


# -- from an instance


class Held(Message):
    """A job that an instance has."""

    job: Name
    attempt: Count


class Hello(Message):
    """The first message of a connection."""

    kind: Literal["hello"] = "hello"
    instance: Name
    token: str
    version: str = __version__
    jobs: list[Held] = []


class Beat(Message):
    """The instance lives. `free_bytes`: that are left on its fullest rank, if it plans memory."""

    kind: Literal["beat"] = "beat"
    free_bytes: int | None = None


class LogProb(Message):
    """How likely a token was."""

    token: str
    bytes: list[int] | None
    log_prob: float


class TokenLogProb(LogProb):
    """The same of a token that was chosen, with the likeliest ones in its place."""

    top: list[LogProb] = []


class Piece(Message):
    """What one choice of a completion has got since the last one."""

    kind: Literal["piece"] = "piece"
    id: Name
    choice: Count
    text: str = ""
    log_probs: list[TokenLogProb] = []
    finish: Literal["stop", "length"] | None = None
    prompt_tokens: Count
    completion_tokens: Count
    """Of this choice, so far."""


class Broken(Message):
    """A completion is over before its end; `is_clients`: because of what the client asked for."""

    kind: Literal["broken"] = "broken"
    id: Name
    message: str
    param: str | None = None
    code: str | None = None
    is_clients: bool = False


class Report(Message):
    """Something that the server is to know for good."""

    number: Count


class State(Report):
    """A job's state has changed; see `tasks.life.State`. `no_room`: it does not fit beside those that train there."""

    kind: Literal["state"] = "state"
    job: Name
    attempt: Count
    state: str
    reason: str = ""
    total_steps: Count | None = None


class Lines(Report):
    """Lines of a job's metrics, in their order."""

    kind: Literal["lines"] = "lines"
    job: Name
    attempt: Count
    lines: list[dict[str, Any]]


class Saved(Report):
    """A complete save has a job's checkpoint. `status` is what a manifest says: `running`, `finished`, `failed`..."""

    kind: Literal["saved"] = "saved"
    job: Name
    attempt: Count
    step: Count
    checkpoint: str
    """Its directory, below the service's."""
    status: str
    reason: str = ""


AnyReport = Annotated[State | Lines | Saved, Field(discriminator="kind")]


class Reports(Message):
    """Reports that are to be committed together."""

    kind: Literal["reports"] = "reports"
    reports: list[AnyReport]


AnyCommand = Welcome | Submit | Leave | Complete | Abandon | Drain | Acknowledge | Refuse
AnyFromInstance = Hello | Beat | Reports | Piece | Broken
Command = Annotated[AnyCommand, Field(discriminator="kind")]
FromInstance = Annotated[AnyFromInstance, Field(discriminator="kind")]

_COMMANDS: TypeAdapter[Any] = TypeAdapter(Command)
_FROM_INSTANCES: TypeAdapter[Any] = TypeAdapter(FromInstance)


def read_command(line: bytes) -> AnyCommand:
    """Read a message of a server.

    Raises:
        ValueError: It is none.
    """
    command: AnyCommand = _COMMANDS.validate_json(line)
    return command


def read_from_instance(line: bytes) -> AnyFromInstance:
    """Read a message of an instance.

    Raises:
        ValueError: It is none.
    """
    message: AnyFromInstance = _FROM_INSTANCES.validate_json(line)
    return message
