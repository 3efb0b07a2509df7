"""Reads the `sweep` of a task, and says all that is wrong with it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_mux.section import LARGEST_COUNT, Number, number, shown
from megatron_mux.tasks.sampler import first_trials
from megatron_mux.tasks.sweep import (
    MOST_CONFIGURATIONS,
    SECTIONS,
    Dimension,
    Range,
    SamplerSpec,
    Settings,
    Sweep,
    count,
    unseen,
)
from megatron_mux.tasks.wording import did_you_mean, sentences

_KINDS = ("uniform", "log_uniform", "int_uniform")
_OPTIONS = ("samples", "seed", "sampler")


def read_sweep(value: Any, sweep: Sweep) -> tuple[Sweep, list[str]]:
    """Read the `sweep` of a task, with its configurations; where a sampler chooses them, with the first ones.

    Args:
        value: As the task file has it: fields with their values and options, or a list of settings.
        sweep: Knows nothing of it yet.

    Returns:
        The sweep; and what is wrong, each reading on after `sweep`. If anything is, the sweep has the values that could
        be read, of a list those of its first settings, and no configurations.
    """
    if isinstance(value, list) and value:
        return _listed(value, sweep)
    if not isinstance(value, dict) or not value.keys() - set(_OPTIONS):
        return sweep, [
            f": must be a mapping such as {{adapter.r: [4, 16]}}, or a list of such settings, got {shown(value)}"
        ]
    fields = {key: own for key, own in value.items() if key not in _OPTIONS}
    problems = _problems_of_keys(fields, "")
    space: dict[str, Dimension] = {}
    for key, own in fields.items():
        dimension = _dimension(key, own) if _is_field(key) else ""
        if not isinstance(dimension, str):
            space[key] = dimension
        elif dimension:
            problems.append(f".{key}: {dimension}")
    sweep = replace(sweep, space=space)
    samples, seed = value.get("samples"), value.get("seed", 0)
    for option, least in (("samples", 1), ("seed", 0)):
        given = value.get(option, 1)
        if type(given) is not int or not least <= given <= LARGEST_COUNT:
            problems.append(f".{option}: must be a whole number of at least {least}, got {shown(given)}")
    if value.get("sampler") is not None:
        spec, wrong = _sampler(value, {} if problems else space)
        problems += wrong
        return (sweep if problems else first_trials(replace(sweep, sampler=spec))), problems
    if not problems:
        problems += _problems_of_count(space, samples, seed if "seed" in value else None)
    if problems:
        return sweep, problems
    combinations = _grid(space) if samples is None else _samples(space, samples, f"{seed}:{sweep.name}")
    return _with_names(sweep, list(combinations)), []


def swept_keys(value: Any) -> Iterable[Any]:
    """The keys of a `sweep`, which may be wrong."""
    settings = value if isinstance(value, list) else [value]
    return dict.fromkeys(key for own in settings if isinstance(own, dict) for key in own)


def _listed(value: Sequence[Any], sweep: Sweep) -> tuple[Sweep, list[str]]:
    """Read a list of settings."""
    problems = [text for i, own in enumerate(value) for text in _problems_of_keys(own, f"[{i}]")]
    settings = [
        {key: _value(key, own) for key, own in one.items() if _is_field(key)}
        for one in value
        if isinstance(one, dict)
    ]
    if not problems:
        problems = [f"[{i}]: is there twice" for i, own in enumerate(settings) if own in settings[:i]]
    if len(settings) > MOST_CONFIGURATIONS:
        problems.append(f": has {len(settings)} configurations, more than {MOST_CONFIGURATIONS}: give fewer")
    if problems:
        first = settings[0] if settings else {}
        return replace(sweep, space={key: (own,) for key, own in first.items()}), problems
    return _with_names(sweep, settings), []


def _sampler(
    value: Mapping[str, Any], space: Mapping[str, Dimension]
) -> tuple[SamplerSpec | None, list[str]]:
    """The sampler of a sweep, and what is wrong with it; the space is empty if it is not known."""
    problems = [
        f".{name}: is not for a sampler: leave it out" for name in ("samples", "seed") if name in value
    ]
    try:
        spec = SamplerSpec.model_validate(given := value["sampler"])
    except ValidationError as error:
        mark = "." if isinstance(given, dict) else ": "
        return None, problems + [f".sampler{mark}{text}" for text in sentences(error, {}, SamplerSpec)]
    if find_spec("optuna") is None:
        problems.append(
            ".sampler: tpe needs the package optuna: pip install optuna, or give samples: N instead"
        )
    there = math.prod(map(count, space.values()))
    if spec.trials > there and space:
        problems.append(
            f".sampler.trials: there are only {int(there)} combinations: give at most {int(there)}"
        )
    return spec, problems


def _is_field(key: Any) -> bool:
    """Whether a key is a section of a task and something in it."""
    section, _, name = key.partition(".") if isinstance(key, str) else ("", "", "")
    return section in SECTIONS and bool(name)


def _problems_of_keys(value: Any, where: str) -> list[str]:
    """What is wrong with the names of fields."""
    if not isinstance(value, dict) or not value:
        return [f"{where}: must be a mapping such as {{adapter.r: 4}}, got {shown(value)}"]
    problems = []
    for key in value:
        if not _is_field(key):
            section, dot, name = str(key).partition(".")
            near = did_you_mean(section, SECTIONS if dot else _OPTIONS).replace("'?", f"{dot}{name}'?")
            problems.append(
                f"{where}.{key}: must be a field of a section, such as adapter.r, or one of "
                f"{', '.join(_OPTIONS)}{near}"
            )
    return problems


def _value(key: str, value: Any) -> Any:
    """A field's value, as a number if it is meant as one: not where names and paths are read."""
    is_text = key.startswith(("data.", "eval.")) or key.endswith("path")
    return value if is_text else number(value)


def _dimension(key: str, value: Any) -> Dimension | str:
    """The values of a field; or what is wrong with them."""
    if isinstance(value, list):
        if not value:
            return "must have at least one value, got an empty list"
        value = [_value(key, own) for own in value]
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
    there = math.prod(map(count, space.values()))
    if samples is None:
        if ranges:
            return [f".{ranges[0]}: a range has no end of values: add samples: N, or give a list"]
        if seed is not None:
            return [".seed: is of samples: leave it out"]
    elif samples > there:
        advice = f"give at most {int(there)}" if ranges else "leave samples out"
        return [f".samples: there are only {int(there)} combinations: {advice}"]
    most = int(there) if samples is None else samples
    if most > MOST_CONFIGURATIONS:
        advice = "give fewer values, or samples: N" if samples is None else "give fewer"
        return [f": has {most} configurations, more than {MOST_CONFIGURATIONS}: {advice}"]
    return []


def _grid(space: Mapping[str, Dimension]) -> Iterator[Settings]:
    """All combinations; the last field changes first."""
    values = [own for own in space.values() if not isinstance(own, Range)]
    for combination in itertools.product(*values):
        yield dict(zip(space, combination, strict=True))


def _samples(space: Mapping[str, Dimension], samples: int, seed: str) -> Iterator[Settings]:
    """Draw settings, each other than those before it."""
    generator, drawn = random.Random(seed), list[Settings]()
    for _ in range(samples):
        drawn.append(unseen(space, drawn, generator))
    yield from drawn


def _with_names(sweep: Sweep, settings: Sequence[Settings]) -> Sweep:
    """The sweep with its configurations."""
    named: dict[str, Settings] = {}
    for own in settings:
        named[sweep.name_of(own, named)] = own
    return replace(sweep, configurations=named)
