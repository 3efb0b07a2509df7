"""The body of a request for a job: OpenAI's fields, and the sections of `tasks.yaml` as fields of our own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from megatron_mux.section import LARGEST_BATCH, problem, shown
from megatron_mux.serve.jobs.fields import SECTIONS, Fault, faults_of_section

_DEEPEST = 32
"""Levels of objects and lists within a body."""
_MOST_ENTRIES = 4096
"""Of one of them."""
_LARGEST = 1e38
"""Numbers beyond it cannot be computed with in fp32."""
_MOST_FAULTS = 100
_LONGEST_PARAM = 120

_OPENAI_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


def _auto(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    return None if value == "auto" else validate(value)


Count = Annotated[int | None, Field(ge=1, le=LARGEST_BATCH), WrapValidator(_auto)]
Factor = Annotated[float | None, Field(gt=0, le=1e6), WrapValidator(_auto)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Hyperparameters(_Body):
    """OpenAI's; None stands for "auto"."""

    n_epochs: Count = None
    batch_size: Count = None
    learning_rate_multiplier: Factor = None


class PreferenceHyperparameters(Hyperparameters):
    """Those of DPO."""

    beta: Factor = None


class Supervised(_Body):
    """Learn what the assistant says."""

    hyperparameters: Hyperparameters = Hyperparameters()


class Preference(_Body):
    """Learn which of two answers is preferred."""

    hyperparameters: PreferenceHyperparameters = PreferenceHyperparameters()


class Method(_Body):
    """How a job learns."""

    type: Literal["supervised", "dpo"]
    supervised: Supervised | None = None
    dpo: Preference | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _is_offered(cls, value: Any) -> Any:
        if value == "reinforcement":
            raise problem("reinforcement is not offered by this server: use supervised or dpo")
        return value

    @field_validator("supervised", "dpo")
    @classmethod
    def _is_its_own(cls, value: Any, info: ValidationInfo) -> Any:
        chosen = info.data.get("type", info.field_name)
        if value is not None and chosen != info.field_name:
            raise problem(f"method.type is {chosen}: leave it out")
        return value


class JobRequest(_Body):
    """What `POST /fine_tuning/jobs` asks for.

    Attributes:
        model: Name of a backbone.
        training_file, validation_file: Ids of files.
        suffix: Part of the name of the model that is made.
        seed: Of the job; None: the server draws one.
        integrations: Accepted only if there are none.
        hyperparameters: Deprecated by OpenAI: those of a supervised method.
        adapter, data, training, eval: Sections of `tasks.yaml`, checked against the table in `fields`.
        priority: Among the tenant's jobs, higher ones come first.
    """

    model: Annotated[str, Field(min_length=1, max_length=255)]
    training_file: Annotated[str, Field(min_length=1, max_length=64)]
    validation_file: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    suffix: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    integrations: list[Any] | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    adapter: dict[str, Any] | None = None
    data: dict[str, Any] = {}
    training: dict[str, Any] = {}
    eval: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] = 0

    @field_validator("integrations")
    @classmethod
    def _none_of_them(cls, value: list[Any] | None) -> None:
        if value:
            raise problem("this server reports to no other service: leave it out")

    @field_validator("data", "training", mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        return {} if value is None else value

    @property
    def method_type(self) -> Literal["supervised", "dpo"]:
        """OpenAI's name for how it learns. ORPO and KTO (`training.loss`), which OpenAI lacks, count as supervised."""
        if self.method is not None:
            return self.method.type
        return "dpo" if self.training.get("loss") == "dpo" else "supervised"

    @property
    def chosen(self) -> tuple[str, Hyperparameters]:
        """The hyperparameters that the client gave, and where: `method.supervised.hyperparameters`."""
        own = None if self.method is None else self.method.dpo or self.method.supervised
        if own is not None:
            return f"method.{self.method_type}.hyperparameters", own.hyperparameters
        return "hyperparameters", self.hyperparameters or PreferenceHyperparameters()


def parse_request(body: Any) -> JobRequest | list[Fault]:
    """Read the body of a request.

    A seed in the `training` section becomes the request's own.

    Args:
        body: The JSON value.

    Returns:
        The request, or everything that is wrong with it.
    """
    if not isinstance(body, dict):
        return [Fault("the body must be a JSON object", None, "invalid_type")]
    odd = next(_oddities(body, "", 0), None)
    if odd is not None:  # such values could not be stored or sent on, so nothing else is looked at
        return [odd]
    body, renamed = _with_seed(body)
    faults: list[Fault] = []
    request = None
    try:
        request = JobRequest.model_validate(body)
    except ValidationError as error:
        faults += [_fault(each, renamed) for each in error.errors(include_url=False)]
    for section in SECTIONS:
        given = body.get(section)
        faults += faults_of_section(section, given) if isinstance(given, dict) else []
    if request is not None:
        faults += _contradictions(request)
    if request is None or faults:
        return list(dict.fromkeys(faults))[:_MOST_FAULTS]
    return request


def _with_seed(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The body with the seed of its `training` section as its own, and how to call that in a message."""
    training = body.get("training")
    if not isinstance(training, dict) or "seed" not in training or body.get("seed") is not None:
        return body, {}
    rest = {name: value for name, value in training.items() if name != "seed"}
    return {**body, "training": rest, "seed": training["seed"]}, {"seed": "training.seed"}


def _fault(error: Any, renamed: dict[str, str]) -> Fault:
    """What pydantic found, as the API says it."""
    where = ".".join(str(part) for part in error["loc"] if part != "[key]")
    param = renamed.get(where, where)[:_LONGEST_PARAM]
    kind = error["type"]
    code = _OPENAI_CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    text = {
        "mux": str(error.get("ctx", {}).get("problem")),
        "missing": "is missing",
        "extra_forbidden": "unknown field",
        "string_pattern_mismatch": "must be made of letters, digits, '.', '_' and '-'",
    }.get(kind)
    if text is None:
        text = f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {shown(error['input'])}"
    return Fault(f"{param}: {text}", param, code)


def _contradictions(request: JobRequest) -> Iterator[Fault]:
    """What fits no other field of the request."""

    def fault(param: str, text: str) -> Fault:
        return Fault(f"{param}: {text}", param, "invalid_value")

    if request.method is not None and request.hyperparameters is not None:
        yield fault("hyperparameters", "is deprecated and stands beside method: give those of method alone")
    if request.eval is not None and request.validation_file is None:
        yield fault("eval", "evaluates on a file: give validation_file")
    training, (where, chosen) = request.training, request.chosen
    twice = {
        "n_epochs": ("num_train_epochs", "max_steps"),
        "batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps"),
        "learning_rate_multiplier": ("learning_rate",),
        "beta": ("beta",),
    }
    for name, others in twice.items():
        for other in others:
            if getattr(chosen, name, None) is not None and training.get(other) is not None:
                yield fault(f"training.{other}", f"is given by {where}.{name} too: leave one out")
    if request.seed is not None and "seed" in training:
        yield fault("training.seed", "is given by seed too: leave one out")
    loss = {"supervised": "sft", "dpo": "dpo"}[request.method_type]
    if request.method is not None and training.get("loss", loss) != loss:
        yield fault(
            "training.loss", f"method.type is {request.method_type}, which is loss: {loss}: leave one out"
        )


def _oddities(value: Any, where: str, depth: int) -> Iterator[Fault]:
    """Values that no field takes, and that a database or an answer could not hold."""
    param = where[:_LONGEST_PARAM] or None
    label = f"{param}: " if param else ""
    if isinstance(value, str):
        if "\0" in value or not _is_unicode(value):
            yield Fault(f"{label}holds a NUL or half a surrogate pair", param, "invalid_value")
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        if not (-_LARGEST <= value <= _LARGEST) or (isinstance(value, float) and not math.isfinite(value)):
            yield Fault(f"{label}must be a finite number of at most {_LARGEST:g}", param, "invalid_value")
    elif isinstance(value, dict | list):
        if depth >= _DEEPEST or len(value) > _MOST_ENTRIES:
            wrong = "is nested too deeply" if depth >= _DEEPEST else f"has more than {_MOST_ENTRIES} entries"
            yield Fault(f"{label}{wrong}", param, "invalid_value")
            return
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            if isinstance(key, str) and ("\0" in key or not _is_unicode(key)):
                yield Fault(f"{label}has a key with a NUL or half a surrogate pair", param, "invalid_value")
                return
            yield from _oddities(inner, f"{where}.{key}" if where else str(key), depth + 1)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
