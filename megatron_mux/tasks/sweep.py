"""A task's sweep: the values of its fields, how they are drawn, and the configurations that come of them."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from megatron_mux.section import LARGEST_COUNT, Section
from megatron_mux.tasks.spec import LONGEST_NAME

SECTIONS = ("adapter", "data", "training", "eval")
"""Sections of a task whose fields can be swept."""
MOST_CONFIGURATIONS = 1000
"""Of one sweep: more of a grid is a slip."""

Settings = Mapping[str, Any]
"""Values by field, such as `adapter.r`."""

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
        """How many values can be drawn; infinity: more than a sweep has configurations."""
        if self.kind == "int_uniform":
            return self.high - self.low + 1
        count = sum(1 for _ in itertools.islice(self.values(), MOST_CONFIGURATIONS + 1))
        return count if count <= MOST_CONFIGURATIONS else math.inf

    def values(self) -> Iterator[float | int]:
        """Yield what can be drawn, from the bound that is further from zero: towards zero there is no end."""
        if self.kind == "int_uniform":
            yield from range(int(self.low), int(self.high) + 1)
            return
        low, high = (Decimal(f"{bound:.{_DIGITS}g}") for bound in (self.low, self.high))
        falls, digits = abs(high) >= abs(low), Context(prec=_DIGITS)
        value = high if falls else low
        while low <= value <= high:
            yield self.within(float(value))
            value = value.next_minus(digits) if falls else value.next_plus(digits)

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


def count(dimension: Dimension) -> float:
    """How many values a field may have."""
    return dimension.count if isinstance(dimension, Range) else len(dimension)


def contains(dimension: Dimension, value: Any) -> bool:
    """Whether a field may have a value."""
    if not isinstance(dimension, Range):
        return value in dimension
    return isinstance(value, int | float) and dimension.low <= value <= dimension.high


def rounded(value: float) -> float:
    """A number with three significant digits."""
    return float(f"{value:.{_DIGITS}g}")


def unseen(space: Mapping[str, Dimension], seen: Collection[Settings], generator: random.Random) -> Settings:
    """Draw settings other than those seen.

    Where draws keep meeting these, since few others are left or they are hardly ever drawn, it takes the first other
    one; a repeat only if there is none.
    """
    for _ in range(_TRIES):
        settings: Settings = {
            key: own.draw(generator) if isinstance(own, Range) else generator.choice(own)
            for key, own in space.items()
        }
        if settings not in seen:
            return settings
    values = [own.values() if isinstance(own, Range) else own for own in space.values()]
    few = [itertools.islice(own, MOST_CONFIGURATIONS + 1) for own in values]
    others = (dict(zip(space, own, strict=True)) for own in itertools.product(*few))
    return next((own for own in others if own not in seen), settings)


def with_defaults(item: Any, defaults: Mapping[str, Any]) -> Any:
    """An entry with the fields of the defaults that it does not give.

    Of another kind of adapter than the defaults' nothing is merged into `adapter`; a section that is given as nothing
    stays so.
    """
    if not isinstance(item, dict):
        return item
    merged = dict(item)
    for section, fields in defaults.items():
        own = item.get(section, {})
        kinds = [given.get("peft_type") for given in (own, fields) if isinstance(given, dict)]
        if not isinstance(own, dict) or (
            section == "adapter" and None not in kinds and kinds[0] != kinds[-1]
        ):
            continue
        merged[section] = {**fields, **own}
    return merged


def with_settings(item: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """A copy of an entry with other values in some fields."""
    changed = copy.deepcopy(dict(item))
    for key, value in settings.items():
        own, *_, last = changed, *key.split(".")
        for part in key.split(".")[:-1]:
            if not isinstance(own.get(part), dict):
                own[part] = {}
            own = own[part]
        own[last] = value
    return changed


@dataclass(frozen=True)
class Sweep:
    """The configurations of a task.

    Attributes:
        name: The task's, with which the names of all configurations begin.
        task: Its entry in the task file, without `sweep` and defaults.
        directory: Where relative paths of it start.
        space: The values of each field; empty where configurations are listed.
        sampler: Chooses settings while the run goes on; None: all of them are known.
        configurations: Settings by the names of tasks; those that a sampler chooses first.
        defaults: Sections that are merged into the entry.
    """

    name: str
    task: Mapping[str, Any]
    directory: Path
    space: Mapping[str, Dimension] = field(default_factory=dict)
    sampler: SamplerSpec | None = None
    configurations: Mapping[str, Settings] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> Sequence[str]:
        """The fields that differ between configurations."""
        return tuple(dict.fromkeys(key for own in self.configurations.values() for key in own))

    @property
    def example(self) -> Settings:
        """A value of each field."""
        values = {key: own.values() if isinstance(own, Range) else own for key, own in self.space.items()}
        return {key: next(iter(own)) for key, own in values.items()}

    def varies(self, key: str) -> bool:
        """Whether configurations differ in a field."""
        values = [own.get(key) for own in self.configurations.values()]
        return any(own != values[0] for own in values) or (key in self.space and count(self.space[key]) > 1)

    def entry(self, name: str, settings: Settings) -> dict[str, Any]:
        """The entry of a configuration, as a task file would have it."""
        # The kind comes first: fields of the defaults are of theirs.
        kind = {key: value for key, value in settings.items() if key == "adapter.peft_type"}
        item = with_defaults(with_settings(self.task, kind), self.defaults)
        return {**with_settings(item, settings), "name": name}

    def name_of(self, settings: Settings, taken: Collection[str]) -> str:
        """A name that tells the settings, other than those that are taken."""
        for shortens in (False, True):
            labels = (_label(key, value, shortens) for key, value in settings.items())
            name = "-".join([self.name, *filter(None, labels)])
            if len(name) <= LONGEST_NAME - 5:
                numbered = (name if i == 1 else f"{name}-{i}" for i in itertools.count(1))
                return next(n for n in numbered if n not in taken)
        name = self.name[: LONGEST_NAME - 5]
        return next(n for i in itertools.count(1) if (n := f"{name}-{i:03}") not in taken)


def _label(key: str, value: Any, shortens: bool) -> str:
    """A field and its value in a name; of a list that is shortened, the first value and how many more there are."""
    own, text = key.rpartition(".")[2], value_text(key, value)
    if shortens and isinstance(value, list | tuple) and len(value) > 1:
        text = f"{value_text(key, value[0])}.{len(value) - 1}more"
    return _SHORT.get(own, own) + re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_")


def value_text(key: str, value: Any) -> str:
    """A field's value in a few characters."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ".".join(value_text(key, own) for own in value)
    if isinstance(value, float):
        return f"{value:g}".replace("+", "")
    return Path(str(value)).stem if key.endswith(".path") else "none" if value is None else str(value)
