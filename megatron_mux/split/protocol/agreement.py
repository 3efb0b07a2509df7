"""What a client asks for when it joins, and what the server tells it: the JSON of HELLO and WELCOME.

The server trusts none of it: every field is validated before anything is allocated.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.registry import KINDS
from megatron_mux.adapters.targets import ALL_LINEAR
from megatron_mux.errors import UserError
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.section import problem
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TrainingSpec

PROTOCOL = 3
"""Version of the protocol; ends of different versions refuse each other."""

NAMING_MODULES = ("target_modules", "feedforward_modules")
"""Fields of adapters that may be regular expressions in a task file. Clients send lists: an expression can be made so
that matching it takes a server for ever."""

PATTERNS = ("rank_pattern", "alpha_pattern")
"""Fields of adapters whose keys may be regular expressions in a task file; clients send paths of modules."""

NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields that leave some of `target_modules`; clients send the modules that are left."""

_PATH = re.compile(r"[\w.-]{1,256}")

_MOST_NAMES = 4096
"""Of modules, in a field of an adapter; clients send those that their task targets."""

_LARGEST = 1e38
"""Numbers that are larger cannot be computed with in fp32: a pass fails, on several ranks of a server for all."""

WireDtype = Literal["f64", "f32", "bf16", "f16", "i8"]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Size = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Flag = Annotated[bool, Field(strict=True)]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]


class Fields(BaseModel):
    """The JSON of a message; kinds without fields have this one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def problem_of_training(training: TrainingSpec) -> str:
    """Why a task with this section cannot train with a split server; empty if it can."""
    if training.is_preference:
        return f"training.loss: {training.loss} is not supported with a split server: train it with pretrain_mux.py"
    if not OPTIMIZERS[training.optim].splits:
        return (
            f"training.optim: {training.optim} steps whole tensors and is not supported with a split server: use "
            "adamw_torch_fused, lion_32bit or sgd"
        )
    return ""


def other_version(protocol: object) -> str:
    """Why a client that speaks this version of the protocol is refused; empty if it is ours."""
    if protocol is None or protocol == PROTOCOL:
        return ""
    return (
        f"the client speaks version {str(protocol)[:20]} of the protocol, the server version {PROTOCOL}: install the "
        "same version of megatron-mux on both"
    )


class Proposal(Fields):
    """What a client asks for.

    With equal `incarnation` it is the same process, which reconnects: its last operation may be asked for again.
    """

    protocol: Count = PROTOCOL
    """Version of the protocol."""
    task: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
    """Name of the task; with the certificate's identity it names the session."""
    run: Hex
    """Names the client's run: the server's saves of another run of the same task are not its own."""
    fingerprint: Annotated[str, Field(max_length=128)]
    """Of the backbone that the client's layers are from."""
    cut_front: Size
    """Layers on the client before the body, besides the embedding."""
    cut_back: Count
    """Layers on the client behind the body, besides the final norm and the output layer."""
    wire: WireDtype
    """Dtype of hidden states and gradients on the wire."""
    adapter: dict[str, Any]
    """The task's `adapter` section."""
    training: TrainingSpec
    """The task's `training` section."""
    total_steps: Size
    """Optimizer steps that the task runs for."""
    train_rows: Size
    """Rows of the largest request that has a backward pass: for the memory that is reserved."""
    rows: Size
    """Rows of the largest request, those of evaluations included."""
    sequences: Size
    """Most sequences of a request."""
    longest: Size
    """Tokens of the longest sequence; neither it nor `train_rows` is more than `rows`."""
    step: Count = 0
    """Optimizer steps that the client has done."""
    uploads: Flag = False
    """Whether the client sends the adapter to start from (UPLOAD) before its first request."""
    incarnation: Hex
    """Names the client's process."""

    @field_validator("longest")
    @classmethod
    def _within_rows(cls, value: int, info: ValidationInfo) -> int:
        if max(value, info.data.get("train_rows", 0)) > info.data.get("rows", math.inf):
            raise problem("longest and train_rows must be at most rows")
        return value

    def adapter_spec(self) -> AdapterSpec:
        """The adapter section, validated as that of a task file; the training section is one that a server takes.

        Raises:
            UserError: It is not one that the server can have.
        """
        kind = KINDS.get(str(self.adapter.get("peft_type")))
        if kind is None:
            raise UserError(f"adapter.peft_type: must be one of {', '.join(KINDS)}")
        if self.adapter.get("adapter_name_or_path") is not None:
            raise UserError("adapter.adapter_name_or_path: is a path of the client's; tensors are uploaded")
        if wrong := problem_of_training(self.training):
            raise UserError(wrong)
        for name, value in self.adapter.items():
            if isinstance(value, list | dict) and len(value) > _MOST_NAMES:
                raise UserError(
                    f"adapter.{name}: has {len(value)} entries: a server takes at most {_MOST_NAMES}"
                )
            values = value.values() if isinstance(value, dict) else [value]
            if any(isinstance(value, int | float) and abs(value) > _LARGEST for value in values):
                raise UserError(f"adapter.{name}: must be at most {_LARGEST:g}, to be computed with in fp32")
        self._refuse_expressions()
        try:
            spec = kind.model_validate(self.adapter)
        except ValidationError as error:
            raise UserError(*(f"adapter.{_sentence(e)}" for e in error.errors())) from None
        if getattr(spec, "takes_away", False):
            raise UserError(
                "adapter.init_lora_weights: a server computes no factors of its weights: choose true or gaussian"
            )
        return spec

    def _refuse_expressions(self) -> None:
        for name in NAMING_MODULES:
            targets = self.adapter.get(name)
            if isinstance(targets, str) and targets.lower() != ALL_LINEAR:
                raise UserError(f"adapter.{name}: a server matches no regular expressions: list the modules")
        for name in PATTERNS:
            patterns = self.adapter.get(name)
            if isinstance(patterns, dict) and not all(_PATH.fullmatch(str(key)) for key in patterns):
                raise UserError(
                    f"adapter.{name}: a server matches no regular expressions: give paths of modules, of at most 256 "
                    "characters"
                )
        for name in NARROWING:
            if self.adapter.get(name) is not None:
                raise UserError(f"adapter.{name}: is a client's: list the modules in target_modules")

    def body(self, shape: BackboneShape) -> range:
        """The layers of the session's body.

        Raises:
            UserError: The cut leaves none.
        """
        layers = range(self.cut_front, shape.layers - self.cut_back)
        if not layers:
            raise UserError(
                f"--cut-front {self.cut_front} and --cut-back {self.cut_back} leave no layer of {shape.layers} for the "
                "server: cut nearer to the ends"
            )
        return layers


class Terms(Fields):
    """What the server tells a client that has joined."""

    session: Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
    """Number of the session, in every message from now on."""
    step: Count
    """Optimizer steps that the server's part of the adapter has done."""
    policy: Annotated[str, Field(max_length=128)]
    """What the server keeps between a forward pass and its backward."""
    forward_bytes: Bytes
    """Memory that a forward pass without gradients reserves."""
    backward_bytes: Bytes
    """Memory that a backward pass reserves, its forward pass included."""
    returns_body: Flag = True
    """Whether the server hands out its part of the adapter; else it stays there under the session's name."""


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {error['msg']}"
