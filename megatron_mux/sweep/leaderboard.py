"""The configurations of a sweep, best first: as a table, as `results.csv`, and the line of code that loads the best."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Column, Table

from megatron_mux.tasks.sweep import value_text

FAILED = ("failed", "refused", "removed")
"""Statuses of configurations that cannot win."""

_SHOWN = 20
"""Rows of the table; the file has all."""


@dataclass(frozen=True)
class Row:
    """A configuration and what came of it.

    Attributes:
        settings: Its values by field.
        value: The deciding figure of its last evaluation; None: it was not evaluated.
        step: Optimizer steps before that evaluation.
        steps: Optimizer steps that it has done.
        checkpoint: Directory of its adapter; empty: there is none.
        reason: Why it is in its status, if there is a reason.
    """

    name: str
    settings: Mapping[str, Any]
    value: float | None
    step: int
    steps: int
    status: str
    reason: str = ""
    checkpoint: str = ""


def ranked(rows: Sequence[Row], is_greater_better: bool) -> list[Row]:
    """The rows, best first; those that failed or have no finite figure come last, in the order of the file."""

    def key(row: Row) -> float:
        if row.value is None or not math.isfinite(row.value) or row.status in FAILED:
            return math.inf
        return -row.value if is_greater_better else row.value

    return sorted(rows, key=key)


def table(sweep: str, rows: Sequence[Row], metric: str) -> Group:
    """The best rows of a sweep as a table that fits into 80 columns.

    Args:
        sweep: Its name.
        rows: Best first.
        metric: The deciding figure.
    """
    fields = _fields(rows)
    headings = _headings(fields)
    right = [Column(headings[key], justify="right", overflow="ellipsis") for key in fields]
    ends = (Column(metric, justify="right"), Column("steps", justify="right"), "status")
    drawn = Table(Column("", justify="right"), *right, *ends, box=None, pad_edge=False)
    for place, row in enumerate(rows[:_SHOWN], 1):
        cells = [value_text(key, row.settings.get(key, "-")) for key in fields]
        value = "-" if row.value is None else f"{row.value:.4g}"
        drawn.add_row(str(place), *cells, value, str(row.steps), row.status)
    left_out = [f"and {len(rows) - _SHOWN} more in results.csv"] if len(rows) > _SHOWN else []
    return Group(f"{sweep}: {len(rows)} configurations, best first", drawn, *left_out)


def settings_table(sweep: str, configurations: Mapping[str, Mapping[str, Any]]) -> Group:
    """The settings of a sweep's configurations."""
    rows = [Row(name, settings, None, 0, 0, "") for name, settings in configurations.items()]
    fields = _fields(rows)
    headings = _headings(fields)
    right = [Column(headings[key], justify="right") for key in fields]
    drawn = Table("task", *right, box=None, pad_edge=False)
    for row in rows:
        drawn.add_row(row.name, *(value_text(key, row.settings.get(key, "-")) for key in fields))
    return Group(f"{sweep}: {len(rows)} configurations", drawn)


def to_csv(sweeps: Mapping[str, Sequence[Row]], metric: str) -> str:
    """A line for each configuration, best first, with a column for each field that some sweep has."""
    fields = list(dict.fromkeys(key for rows in sweeps.values() for key in _fields(rows)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["sweep", "rank", "task", *fields, metric, "evaluated_at", "steps", "status", "reason", "checkpoint"]
    )
    for sweep, rows in sweeps.items():
        for place, row in enumerate(rows, 1):
            settings = [row.settings.get(key, "") for key in fields]
            value = "" if row.value is None else repr(row.value)
            ends = [value, row.step, row.steps, row.status, row.reason, row.checkpoint]
            writer.writerow([sweep, place, row.name, *settings, *ends])
    return text.getvalue()


def best_lines(row: Row, metric: str, directory: Path, backbone: str) -> Iterator[str]:
    """Yield lines that name the best configuration, and load its adapter."""
    if row.value is None or row.status in FAILED:
        return
    yield f"best: {row.name} ({metric} {row.value:.4g} after {row.step} steps)"
    if row.checkpoint:
        yield (
            "model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained("
            f'"{backbone}"), "{directory / row.checkpoint}")'
        )


def _fields(rows: Sequence[Row]) -> list[str]:
    """The fields in which rows differ."""
    keys = dict.fromkeys(key for row in rows for key in row.settings)
    return [key for key in keys if len({repr(row.settings.get(key)) for row in rows}) > 1] or list(keys)


def _headings(fields: Sequence[str]) -> dict[str, str]:
    """Short headings: the field alone, unless two sections have one of that name."""
    short = [key.rpartition(".")[2] for key in fields]
    return {key: own if short.count(own) == 1 else key for key, own in zip(fields, short, strict=True)}
