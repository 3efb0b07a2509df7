"""Curves over a logarithmic axis, as SVG files, and where a ratio crosses 1."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """A curve of a plot.

    Attributes:
        label: In the legend.
        points: `(x, y)`, in order.
        colour, style: As matplotlib names them.
    """

    label: str
    points: Sequence[tuple[int, float]]
    colour: str
    style: str = "o-"


def crossing(points: Sequence[tuple[int, float]]) -> float | None:
    """The x from which a ratio is at least 1, interpolated on logarithmic scales; None if it does not rise above 1.

    Args:
        points: `(x, ratio)`, in order.
    """
    for (before, under), (after, over) in zip(points, points[1:], strict=False):
        low, high = log(under), log(over)
        if low < 0 <= high:
            return exp(log(before) + -low / (high - low) * (log(after) - log(before)))
    return None


def draw(
    file: Path,
    curves: Sequence[Curve],
    labels: tuple[str, str],
    marked: Sequence[float] = (),
    level: float | None = None,
    log_y: bool = False,
) -> None:
    """Plot curves, if matplotlib is installed.

    Args:
        file: The SVG.
        curves: All curves.
        labels: Of the two axes.
        marked: Values of x with a vertical line.
        level: Value of y with a horizontal line.
        log_y: Whether y has a logarithmic scale; else it begins at 0.
    """
    try:
        import matplotlib
    except ImportError:
        print(
            "matplotlib is not installed, so no plot is drawn (pip install matplotlib)",
            file=sys.stderr,
        )
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for curve in curves:
        axes.plot(*zip(*curve.points, strict=True), curve.style, color=curve.colour, label=curve.label)
    for x in marked:
        axes.axvline(x, color="grey", linewidth=0.8)
        axes.annotate(f"{x:.0f}", (x, 0), xytext=(3, 3), textcoords="offset points", color="grey")
    if level is not None:
        axes.axhline(level, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for curve in curves for x, _ in curve.points})
    axes.set_xticks(ticks, [str(x) for x in ticks])
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
