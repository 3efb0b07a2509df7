"""Draws memory over time: a panel for each prediction, with bytes stacked by part and the GPU's memory as a line.

A traced step has thousands of moments, and a line for the memory that the allocator has reserved; rankings have a
few named instants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from megatron_mux.errors import UserError
from megatron_mux.memory.estimate import COMMUNICATORS, CONTEXT, FRAGMENTATION, Prediction
from megatron_mux.memory.sizes import GIB, show_size
from megatron_mux.memory.stream.events import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
_POINTS = 4000
"""Maximum number of moments in a panel; of more, the highest of each run is drawn."""
_COLUMNS = 3
_LEAST_WIDE = 4
"""Minimum width of a panel, in bars."""
_FAR = 2.5
"""The GPU's memory is drawn as a line up to this multiple of the highest peak."""
_COLOURS = {
    CONTEXT: "#b0b0b0",
    COMMUNICATORS: "#d0d0d0",
    "parameters": "#4c72b0",
    "adapters": "#55a868",
    "gradients": "#c44e52",
    "optimizer": "#8172b2",
    "activations": "#ccb974",
    "logits": "#dd8452",
    "workspace": "#64b5cd",
    "communication": "#937860",
    FRAGMENTATION: "#f2e6e6",
    "other": "#8c8c8c",
}
"""Of each part of a stream or a ranking."""


@dataclass(frozen=True)
class Panel:
    """The picture of one prediction.

    Attributes:
        times: Names of the moments; empty if there are too many to name.
        columns: Bytes of each part at each moment, from the bottom up.
        reserved: Bytes that the process holds at each moment; empty if the parts include all of them.
    """

    title: str
    times: Sequence[str]
    columns: Mapping[str, Sequence[int]]
    reserved: Sequence[int] = ()

    @property
    def totals(self) -> list[int]:
        """Sum of all parts at each moment."""
        return [sum(sizes) for sizes in zip(*self.columns.values(), strict=True)]

    @property
    def top(self) -> int:
        """Highest value in the panel."""
        return max((*self.totals, *self.reserved))


def check(file: Path) -> None:
    """Raise UserError if a picture cannot be drawn: wrong file name, missing directory, or matplotlib not installed."""
    if file.suffix not in FORMATS:
        raise UserError(f"--plot {file}: must end in {' or '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise UserError(f"--plot {file}: there is no directory {file.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--plot: matplotlib is not installed: pip install matplotlib") from None


def traced(prediction: Prediction, title: str) -> Panel:
    """The panel of a step's stream, live bytes and reserved bytes at up to `_POINTS` moments.

    The moment with most live bytes represents each run of events. Memory outside the allocator is at the bottom.
    """
    stream, replay = prediction.stream, prediction.replay
    live, run = stream.live(), -(-len(stream) // _POINTS) or 1
    chosen = [
        max(range(begin, min(begin + run, len(stream))), key=live.__getitem__)
        for begin in range(0, len(stream), run)
    ]
    outside = prediction.process - prediction.peak_reserved
    columns: dict[str, Sequence[int]] = {CONTEXT: [outside] * len(chosen)} if outside else {}
    codes = np.array(stream.codes, np.int64)
    blocks = np.where(codes < 0, ~codes, codes)
    changes = np.where(codes < 0, -1, 1) * np.array(stream.sizes, np.int64)[blocks]
    categories = np.array(stream.categories)[blocks]
    for number, category in enumerate(CATEGORIES):
        totals = np.cumsum(changes * (categories == number))
        if totals.any():
            columns[str(category)] = totals[chosen].tolist()
    return Panel(title, (), columns, [replay.reserved[index] + outside for index in chosen])


def closed(title: str, instants: Mapping[str, Mapping[str, int]]) -> Panel:
    """The panel of a ranked method.

    Args:
        instants: Bytes by part at each instant, by its name.
    """
    parts = dict.fromkeys(part for found in instants.values() for part, size in found.items() if size)
    columns = {part: [found.get(part, 0) for found in instants.values()] for part in parts}
    return Panel(title, tuple(instants), columns)


def draw(panels: Sequence[Panel], title: str, limit: int, file: Path) -> None:
    """Draw predictions into a PNG or SVG file.

    Args:
        limit: Memory of a GPU in bytes.

    Raises:
        UserError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    width, height = (9.0, 5.0) if len(panels) == 1 else (4.6 * columns, 3.6 * rows + 0.8)
    figure, grid = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, sharey=True)
    top = max(panel.top for panel in panels)
    near = limit <= _FAR * top
    for axes, panel in zip(grid.flat, panels, strict=False):
        _fill(axes, panel)
        if near:
            axes.axhline(limit / GIB, color="firebrick", linestyle="--", linewidth=1.2, label="GPU")
        axes.set_ylim(0, 1.08 * (max(top, limit) if near else top) / GIB)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("GiB of one GPU")
    figure.suptitle(title if near else f"{title} (a GPU has {show_size(limit)})")
    handles = {
        label: handle
        for axes in grid.flat[: len(panels)]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize="small")
    figure.set_layout_engine("constrained")
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise UserError(f"--plot {file} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)


def _fill(axes: Axes, panel: Panel) -> None:
    """Draw one panel."""
    totals = panel.totals
    times = range(len(totals))
    sizes = {part: [size / GIB for size in column] for part, column in panel.columns.items()}
    if panel.times:
        below = [0.0] * len(totals)
        for part, column in sizes.items():
            axes.bar(times, column, bottom=below, width=0.94, color=_COLOURS[part], label=part)
            below = [low + size for low, size in zip(below, column, strict=True)]
        axes.set_xlim(-_LEAST_WIDE / 2 if len(totals) == 1 else -0.6, max(len(totals) - 0.4, _LEAST_WIDE / 2))
        axes.set_xticks(times, [fill(name, 13) for name in panel.times], fontsize="x-small")
    else:
        drawn = [_COLOURS[part] for part in sizes]
        axes.stackplot(times, list(sizes.values()), labels=list(sizes), colors=drawn, step="post")
        axes.plot(
            times, [size / GIB for size in panel.reserved], color="black", linewidth=1, label="reserved"
        )
        axes.set_xlim(0, max(1, len(totals) - 1))
        axes.set_xticks([])
        axes.set_xlabel("allocations and frees, in order", fontsize="small")
    most = max(totals)
    axes.plot([totals.index(most)], [most / GIB], marker="v", markersize=4, color="black")
    axes.annotate(
        f"{show_size(most)}",
        (totals.index(most), most / GIB),
        xytext=(0, 5),
        textcoords="offset points",
        ha="center",
        fontsize="small",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )
    axes.set_title(panel.title, fontsize="medium")
