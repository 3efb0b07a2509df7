"""Pictures of drift: the paper's Figure 3(b) and 3(c) for each task, and the drift of each step beside its bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_mux.pipeline.svg import COLOURS, LEFT, WIDTH, document, text

_ROW, _HEAD, _PLOT = 14, 34, 150


def draw_drift(drift: Mapping[str, Any]) -> str:
    """An SVG picture of what `follow_drift` has found."""
    parts: list[str] = []
    top = 0
    for name, task in drift.items():
        experts = len(task["access"][0][0])
        parts += _title(f"{name}: access of the experts of layer {task['layers'][0]}, step by step", top)
        parts += _steps(task["access"], top + _HEAD)
        top += _HEAD + experts * _ROW
        said = "share of tokens whose selected experts' scores sum up to less (0 to 1), by layer"
        parts += _title(f"{name}: {said}", top)
        lines = [
            [(score, i / (len(row) - 1)) for i, score in enumerate(row)] for row in task["selected_scores"]
        ]
        parts += _curves(lines, top + _HEAD)
        top += _HEAD + _PLOT
        said = f"mean drift of the scores of layer {task['layers'][0]} (blue) and its bound (orange), logarithmic"
        parts += _title(f"{name}: {said}", top)
        parts += _curves(_drift_and_bound(task["steps"]), top + _HEAD)
        top += _HEAD + _PLOT
    return document(parts, top + _HEAD)


def _title(words: str, top: int) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="{top + 24}" font-weight="bold">{text(words)}</text>'


def _steps(access: Sequence[Sequence[Sequence[float]]], top: int) -> Iterator[str]:
    width = WIDTH / len(access)
    for expert in range(len(access[0][0])):
        y = top + expert * _ROW
        yield f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">expert {expert}</text>'
        for step, layers in enumerate(access):
            place = f'x="{LEFT + step * width:.1f}" y="{y}" width="{width + 0.2:.1f}" height="{_ROW - 1}"'
            told = f"<title>step {step}, expert {expert}: {layers[0][expert]:.3f}</title>"
            yield f'<rect {place} fill="#0072B2" fill-opacity="{layers[0][expert]:.3f}">{told}</rect>'


def _drift_and_bound(steps: Sequence[Mapping[str, Any]]) -> list[list[tuple[float, float]]]:
    """Two curves over steps, their logarithms scaled to 0 to 1."""
    drift = [(step["step"], step["layers"][0]["mean"]) for step in steps]
    bound = [(step["step"], step["layers"][0]["bound_mean"]) for step in steps]
    kept = [[(at, math.log10(y)) for at, y in curve if y] for curve in (drift, bound)]
    values = [y for curve in kept for _, y in curve] or [0.0]
    least, most, last = min(values), max(values), max(1, len(steps))
    return [[(at / last, (y - least) / ((most - least) or 1.0)) for at, y in curve] for curve in kept]


def _curves(curves: Sequence[Sequence[tuple[float, float]]], top: int) -> Iterator[str]:
    """Curves of points from 0 to 1 in a frame."""
    yield f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{_PLOT}" fill="none" stroke="#999"/>'
    for i, curve in enumerate(curves):
        points = " ".join(f"{LEFT + x * WIDTH:.1f},{top + (1 - y) * _PLOT:.1f}" for x, y in curve)
        colour = COLOURS[i % len(COLOURS)]
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
