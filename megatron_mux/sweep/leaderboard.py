"""The configurations of a sweep, best first: as a table, as `results.csv`, and the line of code that loads the best."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Column, Table

from megatron_mux.sweep.texts import figure_texts, headings, value_texts

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
    right = partial(Column, justify="right", no_wrap=True)
    texts = _texts(rows)
    settings = [Column(own, justify="right", overflow="ellipsis") for own in texts]  # these give way
    ends = (right(metric), right("steps"), Column("status", no_wrap=True))
    drawn = Table(right(""), *settings, *ends, box=None, pad_edge=False)
    figures = figure_texts([row.value for row in rows[:_SHOWN]])
    for index, (row, figure) in enumerate(zip(rows, figures, strict=False)):
        cells = [own[index] for own in texts.values()]
        drawn.add_row(str(index + 1), *cells, figure, str(row.steps), row.status)
    left_out = [f"and {len(rows) - _SHOWN} more in results.csv"] if len(rows) > _SHOWN else []
    order = "best first" if metric != "loss" else "by the loss of their last batch: give eval to compare them"
    return Group(f"{sweep}: {len(rows)} configurations, {order}", drawn, *left_out)


def settings_table(sweep: str, configurations: Mapping[str, Mapping[str, Any]]) -> Group:
    """The settings of a sweep's configurations."""
    rows = [Row(name, settings, None, 0, 0, "") for name, settings in configurations.items()]
    texts = _texts(rows)
    right = [Column(own, justify="right") for own in texts]
    drawn = Table("task", *right, box=None, pad_edge=False)
    for index, row in enumerate(rows):
        drawn.add_row(row.name, *(own[index] for own in texts.values()))
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
            settings = [_csv_text(row.settings.get(key, "")) for key in fields]
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
        yield "import peft, transformers"
        yield (
            "model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained("
            f'"{backbone}"), "{directory / row.checkpoint}")'
        )


def _fields(rows: Sequence[Row]) -> list[str]:
    """The fields in which rows differ."""
    keys = dict.fromkeys(key for row in rows for key in row.settings)
    return [key for key in keys if len({repr(row.settings.get(key)) for row in rows}) > 1] or list(keys)


def _texts(rows: Sequence[Row]) -> dict[str, list[str]]:
    """What rows have in the fields in which they differ, by the headings of these."""
    shown: dict[str, list[str]] = {}
    for key, own in headings(_fields(rows)).items():
        shown[own] = value_texts(key, [row.settings.get(key, "-") for row in rows])
    return shown


def _csv_text(value: Any) -> Any:
    """A setting as a cell: what is no single value as JSON."""
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value
