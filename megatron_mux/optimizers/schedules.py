"""Schedules of the learning rate: all of `transformers` that are functions of the step alone, by their name there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_CYCLES = {"num_cycles": "number"}
_LEAST = {"min_lr": "number", "min_lr_rate": "number"}
_SHAPES = ("linear", "cosine", "1-sqrt")

Kind = str | tuple[str, ...]
"""What a keyword argument may be: `count`, `number`, or one of several words."""

SCHEDULES: Mapping[str, Mapping[str, Kind]] = {
    "linear": {},
    "cosine": _CYCLES,
    "cosine_with_restarts": {"num_cycles": "count"},
    "polynomial": {"lr_end": "number", "power": "number"},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": "count"},
    "cosine_with_min_lr": {**_CYCLES, **_LEAST},
    "cosine_warmup_with_min_lr": {**_CYCLES, **_LEAST, "warmup_lr_rate": "number"},
    "warmup_stable_decay": {
        "num_decay_steps": "count",
        "num_stable_steps": "count",
        "warmup_type": _SHAPES,
        "decay_type": _SHAPES,
        "min_lr_ratio": "number",
        **_CYCLES,
    },
}
"""The keyword arguments that each schedule takes in `lr_scheduler_kwargs`."""

_LARGEST_POWER = 100.0


def problem_of_kwargs(name: str, kwargs: Mapping[str, Any], learning_rate: float) -> str:
    """What is wrong with the keyword arguments of a schedule, and what it takes; empty if nothing is.

    Args:
        name: Of the schedule.
        kwargs: As given.
        learning_rate: The task's.
    """
    takes = SCHEDULES[name]
    what = f"{name} takes {', '.join(takes)}" if takes else f"{name} takes none"
    unknown = [key for key in kwargs if key not in takes]
    if unknown:
        return f"{unknown[0]!r} is unknown: {what}"
    for key, value in kwargs.items():
        if wrong := _wrong(takes[key], value):
            return f"{key} must be {wrong}, got {value!r}"
    least = [key for key in _LEAST if key in kwargs]
    if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and len(least) != 1:
        return f"{name} needs one of min_lr and min_lr_rate"
    if name == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        return "warmup_stable_decay needs num_decay_steps"
    if name == "polynomial" and kwargs.get("lr_end", 1e-7) >= learning_rate:
        return f"lr_end ({kwargs.get('lr_end', 1e-7)}) must be smaller than learning_rate ({learning_rate})"
    if kwargs.get("power", 1.0) > _LARGEST_POWER:
        return f"power must be at most {_LARGEST_POWER:g}, got {kwargs['power']!r}"
    return ""


def _wrong(kind: Kind, value: Any) -> str:
    """What the value should be; empty if it is."""
    if isinstance(kind, tuple):
        return "" if value in kind else f"one of {', '.join(kind)}"
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
    if kind == "count":
        return "" if number and value == int(value) and value >= 1 else "a whole number of at least 1"
    return "" if number else "a number of at least 0"


def schedule(
    name: str, learning_rate: float, warmup: int, total_steps: int, kwargs: Mapping[str, Any]
) -> Callable[[int], float]:
    """The factor of the learning rate as a function of the step, from 0.

    Args:
        name: Of the schedule.
        learning_rate: Peak rate, which some schedules end relative to.
        warmup: Steps of the warm-up.
        total_steps: Steps that the schedule spans.
        kwargs: Its keyword arguments, checked before.
    """
    import torch
    from transformers.optimization import get_scheduler

    # The schedule is a pure function of the step; a throw-away optimizer is what its constructor asks for.
    throw_away = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=learning_rate)
    scheduler = get_scheduler(
        name,
        throw_away,
        num_warmup_steps=warmup,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=dict(kwargs),
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor
