"""The `sweep` of a task: which settings are tried, and the configurations that come of them."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from megatron_mux.section import LARGEST_COUNT, Number, Section, number, shown
from megatron_mux.tasks.spec import LONGEST_NAME
from megatron_mux.tasks.wording import sentences

SECTIONS = ("adapter", "data", "training", "eval")
"""Sections of a task whose fields can be swept."""
MOST_CONFIGURATIONS = 1000
"""Of one sweep: more of a grid is a slip."""

Settings = Mapping[str, Any]
"""Values by field, such as `adapter.r`."""

_KINDS = ("uniform", "log_uniform", "int_uniform")
_OPTIONS = ("samples", "seed", "sampler")
_DIGITS = 3
_TRIES = 1000
_SHORT: Mapping[str, str] = {
    "learning_rate": "lr",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accumulate",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "target_modules": "",
    "path": "",
    "peft_type": "",
    "optim": "",
    "lr_scheduler_type": "",
}
"""Of fields, in names of configurations; others have their own name there."""


class SamplerSpec(Section):
    """Chooses settings by the results of earlier ones."""

    type: Literal["tpe"]
    """The tree-structured Parzen estimator of Optuna."""
    trials: int = Field(ge=1, le=MOST_CONFIGURATIONS)
    """Configurations in all."""
    at_once: int = Field(default=4, ge=1, le=MOST_CONFIGURATIONS)
    """Configurations that train at a time: the fewer, the more each choice knows."""
    seed: int = Field(default=0, ge=0, le=LARGEST_COUNT)
    """Of the choices."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
        kind: `uniform`; `log_uniform`, where each factor is as likely; or `int_uniform`, whole numbers.
    """

    kind: str
    low: float
    high: float

    @property
    def count(self) -> float:
        """How many values there are, about."""
        return self.high - self.low + 1 if self.kind == "int_uniform" else math.inf

    def draw(self, generator: random.Random) -> float | int:
        """Draw a value; what is no whole number is rounded to three significant digits, so that names can tell it."""
        if self.kind == "int_uniform":
            return generator.randint(int(self.low), int(self.high))
        if self.kind == "uniform":
            return self.within(rounded(generator.uniform(self.low, self.high)))
        exponent = generator.uniform(math.log(self.low), math.log(self.high))
        return self.within(rounded(math.exp(exponent)))

    def within(self, value: float) -> float:
        """The value, or the nearer bound if it is outside, as rounding may have it."""
        return min(max(value, self.low), self.high)


Dimension = Range | tuple[Any, ...]
"""The values of a field: a range, or a few."""


def contains(dimension: Dimension, value: Any) -> bool:
    """Whether a field may have a value."""
    if not isinstance(dimension, Range):
        return value in dimension
    return isinstance(value, int | float) and dimension.low <= value <= dimension.high


def rounded(value: float) -> float:
    """A number with three significant digits."""
    return float(f"{value:.{_DIGITS}g}")


@dataclass(frozen=True)
class Sweep:
    """The configurations of a task.

    Attributes:
        name: The task's, with which the names of all configurations begin.
        task: Its entry in the task file, without `sweep`.
        directory: Where relative paths of it start.
        space: The values of each field; empty where configurations are listed.
        sampler: Chooses settings while the run goes on; None: all of them are known.
        configurations: Settings by the names of tasks; those that a sampler chooses first.
    """

    name: str
    task: Mapping[str, Any]
    directory: Path
    space: Mapping[str, Dimension] = field(default_factory=dict)
    sampler: SamplerSpec | None = None
    configurations: Mapping[str, Settings] = field(default_factory=dict)

    @property
    def fields(self) -> Sequence[str]:
        """The fields that differ between configurations."""
        return tuple(dict.fromkeys(key for own in self.configurations.values() for key in own))

    def entry(self, name: str, settings: Settings) -> dict[str, Any]:
        """The entry of a configuration, as a task file would have it."""
        item = copy.deepcopy(dict(self.task))
        for key, value in settings.items():
            own, *_, last = item, *key.split(".")
            for part in key.split(".")[:-1]:
                if not isinstance(own.get(part), dict):
                    own[part] = {}
                own = own[part]
            own[last] = value
        return {**item, "name": name}

    def name_of(self, settings: Settings, taken: Collection[str]) -> str:
        """A name that tells the settings, other than those that are taken."""
        name = "-".join([self.name, *filter(None, (_label(key, value) for key, value in settings.items()))])
        if len(name) > LONGEST_NAME - 5:
            name = self.name[: LONGEST_NAME - 5]
            return next(n for i in itertools.count(1) if (n := f"{name}-{i:03}") not in taken)
        numbered = (name if i == 1 else f"{name}-{i}" for i in itertools.count(1))
        return next(n for n in numbered if n not in taken)


def read_sweep(
    value: Any, name: str, task: Mapping[str, Any], directory: Path
) -> tuple[Sweep | None, list[str]]:
    """Read the `sweep` of a task, with its configurations unless a sampler chooses them.

    Args:
        value: As the task file has it: fields with their values and options, or a list of settings.
        name: The task's.
        task: Its entry without `sweep`.
        directory: Where relative paths start.

    Returns:
        The sweep, None if something is wrong; and what is wrong, each reading on after `sweep`.
    """
    if isinstance(value, list) and value:
        problems = [text for i, own in enumerate(value) for text in _problems_of_keys(own, f"[{i}]")]
        found = Sweep(name, task, directory)
        settings = [{key: number(own) for key, own in one.items()} for one in value if isinstance(one, dict)]
        problems += [f"[{i}]: is there twice" for i, own in enumerate(settings) if own in settings[:i]]
        if len(settings) > MOST_CONFIGURATIONS:
            problems.append(
                f": has {len(settings)} configurations, more than {MOST_CONFIGURATIONS}: give fewer"
            )
        return (None, problems) if problems else (_with_names(found, settings), [])
    if not isinstance(value, dict) or not value.keys() - set(_OPTIONS):
        return None, [
            f": must be a mapping such as {{adapter.r: [4, 16]}}, or a list of such settings, got {shown(value)}"
        ]
    fields = {key: own for key, own in value.items() if key not in _OPTIONS}
    problems = _problems_of_keys(fields, "")
    space: dict[str, Dimension] = {}
    for key, own in fields.items():
        dimension = _dimension(own)
        if isinstance(dimension, str):
            problems.append(f".{key}: {dimension}")
        else:
            space[str(key)] = dimension
    sampler, samples, seed = value.get("sampler"), value.get("samples"), value.get("seed", 0)
    for option, least in (("samples", 1), ("seed", 0)):
        given = value.get(option, 1)
        if type(given) is not int or not least <= given <= LARGEST_COUNT:
            problems.append(f".{option}: must be a whole number of at least {least}, got {shown(given)}")
    found = Sweep(name, task, directory, space)
    if sampler is not None:
        found, wrong = _sampled(found, sampler, value)
        return (None, problems + wrong) if problems or wrong else (found, [])
    if not problems:
        problems += _problems_of_count(space, samples, seed if "seed" in value else None)
    if problems:
        return None, problems
    combinations = _grid(space) if samples is None else _samples(space, samples, f"{seed}:{name}")
    return _with_names(found, list(combinations)), []


def _sampled(sweep: Sweep, sampler: Any, value: Mapping[str, Any]) -> tuple[Sweep, list[str]]:
    """The sweep with its sampler, and what is wrong with that."""
    problems = [
        f".{name}: is not for a sampler: leave it out" for name in ("samples", "seed") if name in value
    ]
    try:
        spec = SamplerSpec.model_validate(sampler)
    except ValidationError as error:
        problems += [f".sampler.{text}" for text in sentences(error, {}, SamplerSpec)]
        return sweep, problems
    if find_spec("optuna") is None:
        problems.append(
            ".sampler: tpe needs the package optuna: pip install optuna, or give samples: N instead"
        )
    return Sweep(sweep.name, sweep.task, sweep.directory, sweep.space, spec), problems


def _problems_of_keys(value: Any, where: str) -> list[str]:
    """What is wrong with the names of fields."""
    if not isinstance(value, dict) or not value:
        return [f"{where}: must be a mapping such as {{adapter.r: 4}}, got {shown(value)}"]
    return [
        f"{where}.{key}: must be a field of a section, such as adapter.r, or one of {', '.join(_OPTIONS)}"
        for key in value
        if not isinstance(key, str) or key.partition(".")[0] not in SECTIONS or not key.partition(".")[2]
    ]


def _dimension(value: Any) -> Dimension | str:
    """The values of a field; or what is wrong with them."""
    if isinstance(value, list):
        if not value:
            return "must have at least one value, got an empty list"
        value = [number(own) for own in value]
        twice = next((own for i, own in enumerate(value) if own in value[:i]), None)
        return tuple(value) if twice is None else f"has {shown(twice)} twice: name it once"
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in _KINDS:
        return f"must be a list of values, or one of {{{', '.join(_KINDS)}: [LOW, HIGH]}}, got {shown(value)}"
    ((kind, bounds),) = value.items()
    try:
        low, high = TypeAdapter(list[Number]).validate_python(bounds, strict=True)
    except (ValidationError, ValueError):
        return f"{kind} must be two numbers [LOW, HIGH], got {shown(bounds)}"
    if not low < high or not all(map(math.isfinite, (low, high))):
        return f"{kind} must go from a lower number to a higher one, got {shown(bounds)}"
    if kind == "log_uniform" and low <= 0:
        return f"log_uniform must begin above 0, got {shown(bounds)}"
    if kind == "int_uniform" and not (low.is_integer() and high.is_integer()):
        return f"int_uniform must be two whole numbers, got {shown(bounds)}"
    return Range(kind, low, high)


def _problems_of_count(space: Mapping[str, Dimension], samples: int | None, seed: int | None) -> list[str]:
    """Why a grid, or so many samples, cannot be made."""
    ranges = [key for key, own in space.items() if isinstance(own, Range)]
    count = math.prod(own.count if isinstance(own, Range) else len(own) for own in space.values())
    if samples is None:
        if ranges:
            return [f".{ranges[0]}: a range has no end of values: add samples: N, or give a list"]
        if seed is not None:
            return [".seed: is of samples: leave it out"]
    elif samples > count:
        advice = f"give at most {int(count)}" if ranges else "leave samples out"
        return [f".samples: there are only {int(count)} combinations: {advice}"]
    most = int(count) if samples is None else samples
    if most > MOST_CONFIGURATIONS:
        advice = "give fewer values, or samples: N" if samples is None else "give fewer"
        return [f": has {most} configurations, more than {MOST_CONFIGURATIONS}: {advice}"]
    return []


def _grid(space: Mapping[str, Dimension]) -> Iterator[Settings]:
    """All combinations; the last field changes first."""
    values = [own for own in space.values() if not isinstance(own, Range)]
    for combination in itertools.product(*values):
        yield dict(zip(space, combination, strict=True))


def _samples(space: Mapping[str, Dimension], count: int, seed: str) -> Iterator[Settings]:
    """Draw settings, each other than those before it as long as there are others."""
    generator = random.Random(seed)
    drawn: list[Settings] = []
    for _ in range(count):
        for _ in range(_TRIES):
            settings = {
                key: own.draw(generator) if isinstance(own, Range) else generator.choice(own)
                for key, own in space.items()
            }
            if settings not in drawn:
                break
        drawn.append(settings)
    yield from drawn


def _with_names(sweep: Sweep, settings: Sequence[Settings]) -> Sweep:
    """The sweep with its configurations."""
    named: dict[str, Settings] = {}
    for own in settings:
        named[sweep.name_of(own, named)] = own
    return Sweep(sweep.name, sweep.task, sweep.directory, sweep.space, sweep.sampler, named)


def _label(key: str, value: Any) -> str:
    """A field and its value in a name."""
    own = key.rpartition(".")[2]
    return _SHORT.get(own, own) + re.sub(r"[^A-Za-z0-9_.-]+", "_", value_text(key, value)).strip("_")


def value_text(key: str, value: Any) -> str:
    """A field's value in a few characters."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ".".join(value_text(key, own) for own in value)
    if isinstance(value, float):
        return f"{value:g}".replace("+", "")
    return Path(str(value)).stem if key.endswith(".path") else "none" if value is None else str(value)
