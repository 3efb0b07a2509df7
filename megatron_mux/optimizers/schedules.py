"""Schedules of the learning rate: all of `transformers` that are functions of the step alone, by their name there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_CYCLES = {"num_cycles": "number"}
_LEAST = {"min_lr": "number", "min_lr_rate": "number"}
_SHAPES = ("linear", "cosine", "1-sqrt")

Kind = str | tuple[str, ...]
"""What a keyword argument may be: `count`, `number`, or one of several words."""

Curve = Callable[[int], float]
"""The factor of the learning rate as a function of the step, from 0."""

_RAMP = 10
"""A continued schedule reaches its new curve in one of so many of the steps to come."""

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
    """What is wrong with the keyword arguments of a schedule, and what it takes; empty if nothing is."""
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
) -> Curve:
    """Make the curve of a schedule.

    Args:
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
    factor: Curve = scheduler.lr_lambdas[0]
    return factor


def continued(curve_of: Callable[[int], Curve], total_steps: int, before: Sequence[tuple[int, int]]) -> Curve:
    """Make the curve of a task whose number of steps has changed while it trained.

    The steps done keep their rates. From the last of them the rate goes in a line to the curve that a run of the new
    length has from its beginning, and reaches it after a tenth of the steps to come.

    Args:
        curve_of: Makes the curve of a run of so many steps.
        total_steps: Steps of the task by now.
        before: For each change, in order, the steps done by then (at least 1) and the steps of the task until then.
    """
    curve = curve_of(total_steps)
    if not before:
        return curve
    done, total_before = before[-1]
    past = continued(curve_of, total_before, before[:-1])
    last, ramp = past(done - 1), 1 + math.ceil((total_steps - done) / _RAMP)

    def factor(step: int) -> float:
        if step < done:
            return past(step)
        share = min(1.0, (step - done + 1) / ramp)
        return (1 - share) * last + share * curve(step)

    return factor
