"""Curves over a logarithmic axis, as SVG files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
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


def draw(
    file: Path,
    curves: Sequence[Curve],
    labels: tuple[str, str],
    log_y: bool = False,
) -> None:
    """Plot curves, if matplotlib is installed.

    Args:
        file: The SVG.
        curves: All curves.
        labels: Of the two axes.
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
