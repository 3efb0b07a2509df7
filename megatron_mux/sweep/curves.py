"""`curves.svg`: training and evaluation of the configurations of sweeps, by their steps."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_mux.sweep.leaderboard import Row
from megatron_mux.tasks.keeping import is_lower_better

_NAMED = 8
"""Configurations that the legend names."""
_POINTS = 500
"""Of a curve: more cannot be seen."""
_ROOM = 3.0
"""Losses that leave the picture: above so many times the height in which half of the curves stay."""
_MARGIN = 0.05
"""Below curves, as a share of the height."""


def draw(directory: Path, sweeps: Mapping[str, Sequence[Row]], metric: str) -> str:
    """Draw curves as SVG: a row of two pictures for each sweep, the loss in training and the deciding figure.

    Args:
        directory: Of the run, with the metrics of each task.
        sweeps: Rows by sweep, best first. The best one is drawn bold; a cross marks where one was stopped.
        metric: The deciding figure.
    """
    from matplotlib import colormaps, rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 3.8 * len(sweeps)), layout="constrained")
    FigureCanvasSVG(figure)
    colours = colormaps["viridis"]
    for index, (sweep, rows) in enumerate(sweeps.items()):
        for column, key in enumerate(("loss", metric)):
            axes = figure.add_subplot(len(sweeps), 2, 2 * index + column + 1)
            curves = [_points(directory / row.name / "metrics.jsonl", key) for row in rows]
            for place in reversed(range(len(rows))):
                row, points = rows[place], curves[place]
                colour = colours(0.9 * place / max(1, len(rows) - 1))
                label = row.name if place < _NAMED else None
                width = 2.2 if place == 0 else 1.0
                axes.plot(
                    *zip(*points, strict=True) if points else ([], []), color=colour, lw=width, label=label
                )
                if points and row.status == "pruned":
                    axes.plot(*points[-1], marker="x", color=colour, ms=6)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if is_lower_better(key.removeprefix("eval_")):
                axes.set_ylim(_bounds(curves))
            axes.set(title=sweep if column == 0 else None, xlabel="step", ylabel=key)
            if column == 1:
                handles, labels = axes.get_legend_handles_labels()
                axes.legend(handles[::-1], labels[::-1], fontsize=7, loc="upper right", title="best first")
    text = io.StringIO()
    with rc_context({"svg.hashsalt": "megatron-mux", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _bounds(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float] | None:
    """Between which figures to draw where some diverged, so that the others can be seen; None: all of them."""
    highest = sorted(max(value for _, value in points) for points in curves if points)
    if not highest:
        return None
    least = min(value for points in curves for _, value in points)
    height = _ROOM * (highest[(len(highest) - 1) // 2] - least)
    return (least - _MARGIN * height, least + height) if 0 < height < highest[-1] - least else None


def _points(path: Path, key: str) -> list[tuple[int, float]]:
    """The finite figures of a metrics file under one key, by their steps; thinned out where there are many."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, float]] = []
    for text in lines:
        line: Any = json.loads(text) if text.endswith("}") else {}  # a kill may leave a part of a line
        if line.get(key) is not None and math.isfinite(line[key]):
            found.append((int(line["step"]), float(line[key])))
    every = -(-len(found) // _POINTS) or 1
    return [*found[:-1:every], *found[-1:]]
