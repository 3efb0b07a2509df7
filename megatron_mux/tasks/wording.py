"""Turns validation errors into sentences that say where, what was expected and what to change."""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import annotated_types
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_mux.adapters.registry import KINDS
from megatron_mux.section import Section, plain, shown
from megatron_mux.tasks.data import DataSpec
from megatron_mux.tasks.evaluation import EvalSpec
from megatron_mux.tasks.spec import TaskSpec
from megatron_mux.tasks.training import TrainingSpec

_OF_PEFT = frozenset(
    """
    LORA IA3 PREFIX_TUNING PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING ADALORA ADAMSS BOFT ADAPTION_PROMPT BEFT LILY
    LOHA LOKR OFT POLY LN_TUNING VERA FROD PVERA FOURIERFT GLORA XLORA HRA VBLORA UNILORA CPT MISS RANDLORA ROAD
    TRAINABLE_TOKENS HIRA SHIRA C3A WAVEFT OSF DELORA GRALORA CARTRIDGE TINYLORA PSOFT PEANUT SHADOW SUPERTUNING DEFT
    """.split()
)
"""All methods of peft: one that we lack gets another message than a misspelt one."""

_MOST_KEYS = 24
"""Keys of a section that a message lists."""

_ALSO_CALLED: Mapping[str, str] = {
    "rank": "r",
    "lora_r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
}
"""What people write for fields of peft and transformers, which their spelling is far from."""

_SECTIONS: Mapping[str, type[Section]] = {"data": DataSpec, "training": TrainingSpec, "eval": EvalSpec}


TASK_KEYS = (*TaskSpec.model_fields, "sweep")
"""Keys of a task in a task file."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or nothing when no known word is close."""
    by_lower = {k.lower().replace("-", "_"): k for k in known}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def sentences(error: ValidationError, task: Mapping[str, Any], root: type[Section] = TaskSpec) -> list[str]:
    """Describe the problems of a task, one sentence each, in the order of its keys.

    Args:
        error: What pydantic found.
        task: The mapping that was validated.
        root: The section that it was validated as.

    Returns:
        Sentences such as `training.learning_rate: must be a number greater than 0, got 'fast'`.
    """
    return list(dict.fromkeys(_sentence(e, task, root) for e in error.errors(include_url=False)))


def _sentence(error: Any, task: Mapping[str, Any], root: type[Section]) -> str:
    path, model, field = _walk(error["loc"], root)
    where = f"{path}: " if path else ""
    kind, value = error["type"], error["input"]
    if kind == "mux":
        return where + str(error["ctx"]["problem"])
    if kind == "missing":
        expected = _expected(field) if field is not None else f"a mapping of {_section_keys(path, model)}"
        return f"{where}is missing: it must be {expected}"
    if kind == "extra_forbidden":
        return where + _unknown(str(error["loc"][-1]), model)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _peft_type(task)
    if field is None:
        return f"{where}must be a mapping of {_section_keys(path, model)}, got {shown(value)}"
    return f"{where}must be {_expected(field)}, got {shown(value)}{_hint(field, value)}"


def _walk(loc: tuple[Any, ...], root: type[Section]) -> tuple[str, type[BaseModel], FieldInfo | None]:
    """Return the dotted path of a location, its model, and its field (None: a section or no field)."""
    model: type[BaseModel] = root
    field: FieldInfo | None = None
    path: list[str] = []
    for part in loc:
        if model is TaskSpec and part in _SECTIONS and field is None:
            model = _SECTIONS[part]
            path.append(part)
        elif model is TaskSpec and part == "adapter":
            path.append(part)
        elif path == ["adapter"] and part in KINDS:
            model = KINDS[part]
        elif field is None:
            path.append(plain(str(part)))
            field = model.model_fields.get(str(part))
        elif isinstance(part, int) and (inner := _list_of(field)) is not None:
            path[-1] += f"[{part}]"
            model, field = inner, None
        else:
            break  # inside a field's own value
    return ".".join(path), model, field


def _list_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field has a list of."""
    for option in (field.annotation, *typing.get_args(field.annotation)):
        for item in typing.get_args(_without_metadata(option)):
            if isinstance(item, type) and issubclass(item, Section):
                return item
    return None


def _keys(model: type[BaseModel]) -> str:
    return ", ".join(TASK_KEYS if model is TaskSpec else model.model_fields)


def _known_keys(model: type[BaseModel], key: str) -> str:
    """What keys there are: of a long list those that are written most like `key`."""
    if len(model.model_fields) <= _MOST_KEYS:
        return f"the keys here are {_keys(model)}"
    near = difflib.get_close_matches(key.lower(), model.model_fields, n=_MOST_KEYS // 3, cutoff=0.0)
    return f"among the keys here are {', '.join(near)}"


def _section_keys(path: str, model: type[BaseModel]) -> str:
    return "peft_type and the fields of that method" if path == "adapter" else _keys(model)


def _unknown(key: str, model: type[BaseModel]) -> str:
    refused = model.refused.get(key) if issubclass(model, Section) else None
    if refused is not None:
        return refused.advice
    usual = _ALSO_CALLED.get(key.lower())
    if usual in model.model_fields:
        return f"unknown key; did you mean {usual!r}?"
    near = did_you_mean(key, TASK_KEYS if model is TaskSpec else model.model_fields)
    if not near:
        elsewhere = {
            f: f"{s}.{f}" for s, other in _SECTIONS.items() if other is not model for f in other.model_fields
        }
        close = difflib.get_close_matches(key.lower(), elsewhere, n=1, cutoff=0.8)
        near = f"; did you mean {elsewhere[close[0]]!r}?" if close else ""
    return "unknown key" + (near or f": {_known_keys(model, key)}")


def _peft_type(task: Mapping[str, Any]) -> str:
    adapter = task.get("adapter")
    known = ", ".join(KINDS)
    if not isinstance(adapter, dict) or "peft_type" not in adapter:
        return f"adapter.peft_type: is missing: it must be one of {known}"
    given = adapter["peft_type"]
    if isinstance(given, str) and given in _OF_PEFT:
        return f"adapter.peft_type: {given} is a method of peft that megatron-mux does not support: use one of {known}"
    if isinstance(given, str) and given.upper() in ("DORA", "RSLORA"):
        flag = f"use_{given.lower()}"
        return f"adapter.peft_type: {given} is LORA with {flag}: true: write peft_type: LORA, {flag}: true"
    near = did_you_mean(given, KINDS) if isinstance(given, str) else ""
    return f"adapter.peft_type: must be one of {known}, got {shown(given)}{near}"


def _expected(field: FieldInfo) -> str:
    """Describe the values that a field takes."""
    options = {_bare(a) for a in (field.annotation, *typing.get_args(field.annotation))}
    if choices := _choices(field):
        return f"one {'or a list ' * (list in options)}of {', '.join(choices)}"
    if bool in options:
        return "true or false"
    if int in options:
        return _bounded("a whole number", field)
    if float in options:
        return _bounded("a number", field)
    if dict in options:
        return "a mapping"
    if list in options:
        return "a list of module names such as [q_proj, v_proj]"
    return "a path" if Path in options else "text"


def _choices(field: FieldInfo) -> list[str]:
    """The values of a `Literal`, or of a list of them; empty for other fields."""
    for option in (field.annotation, *typing.get_args(field.annotation)):
        if typing.get_origin(option) is Literal:
            return [str(value) for value in typing.get_args(option)]
    return []


def _bare(annotation: Any) -> Any:
    """Strip `Annotated` metadata and parameters from a type."""
    annotation = _without_metadata(annotation)
    return typing.get_origin(annotation) or annotation


def _without_metadata(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def _bounded(what: str, field: FieldInfo) -> str:
    bounds = []
    for rule in field.metadata:
        if isinstance(rule, annotated_types.Ge):
            bounds.append(f"of at least {rule.ge}")
        elif isinstance(rule, annotated_types.Gt):
            bounds.append(f"greater than {rule.gt}")
        elif isinstance(rule, annotated_types.Lt):
            bounds.append(f"less than {rule.lt}")
        elif isinstance(rule, annotated_types.Le):
            bounds.append(f"at most {rule.le}")
    return " ".join([what, " and ".join(bounds)]) if bounds else what


def _hint(field: FieldInfo, value: Any) -> str:
    if isinstance(value, bool) and _choices(field):
        return " (YAML reads yes, no, on and off as true and false: put quotes around text)"
    if isinstance(value, str) and (choices := _choices(field)):
        return did_you_mean(value, choices)
    return _hint_of_number(value) if isinstance(value, str) else ""


def _hint_of_number(text: str) -> str:
    """What to change where a number is meant and a text was read; nothing if the text is no number."""
    try:
        number = float(text)
        is_one_in_yaml = isinstance(yaml.safe_load(text), (int, float))
    except (ValueError, yaml.YAMLError):
        return ""
    if is_one_in_yaml:
        return " (a text: leave the quotes out)"
    # YAML 1.1 reads `1e0` as text, with and without quotes.
    return f" (YAML reads that as text: write {number:.12g})" if math.isfinite(number) else ""
