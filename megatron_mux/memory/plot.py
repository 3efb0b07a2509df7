"""Memory over time as a picture: a panel for each prediction, bytes by part stacked, the GPU's memory as a line.

A traced step has thousands of moments, and what the allocator has reserved above them; closed forms know a few
instants, the papers' only their peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mux.errors import UserError
from megatron_mux.memory.estimate import COMMUNICATORS, CONTEXT, FRAGMENTATION, Prediction
from megatron_mux.memory.sizes import GIB, show_size
from megatron_mux.memory.stream.events import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
_POINTS = 4000
"""More events than a picture has columns are drawn as the most of each run of them."""
_COLUMNS = 3
_LEAST_WIDE = 4
"""As many bars as a panel of one has room for."""
_FAR = 2.5
"""A GPU with more memory than so many times the highest peak is not drawn to scale."""
_COLOURS = {
    "base": "#b0b0b0",
    CONTEXT: "#b0b0b0",
    COMMUNICATORS: "#d0d0d0",
    "parameters": "#4c72b0",
    "adapters": "#55a868",
    "gradients": "#c44e52",
    "optimizer": "#8172b2",
    "activations": "#ccb974",
    "outputs": "#ccb974",
    "logits": "#dd8452",
    "lm_head": "#dd8452",
    "workspace": "#64b5cd",
    "communication": "#937860",
    "buffer": "#e3c9b5",
    FRAGMENTATION: "#f2e6e6",
    "other": "#8c8c8c",
}
_OTHERS = ("#da8bc3", "#2f6b4f", "#7a5195", "#bc5090", "#665c54")
"""For parts without a colour of their own."""


@dataclass(frozen=True)
class Panel:
    """What is drawn of one prediction.

    Attributes:
        title: Above it.
        times: What the moments are, in words; empty for too many to name.
        columns: For each part its bytes at each moment; at the bottom the first.
        reserved: Bytes that the process has of the GPU at each moment; empty where they are among the parts.
    """

    title: str
    times: Sequence[str]
    columns: Mapping[str, Sequence[int]]
    reserved: Sequence[int] = ()

    @property
    def totals(self) -> list[int]:
        """Bytes of all parts at each moment."""
        return [sum(sizes) for sizes in zip(*self.columns.values(), strict=True)]

    @property
    def top(self) -> int:
        """The most that is drawn."""
        return max((*self.totals, *self.reserved))


def check(file: Path) -> None:
    """Raises UserError if no picture can be drawn into a file: for its name, its directory, or want of matplotlib."""
    if file.suffix not in FORMATS:
        raise UserError(f"--plot {file}: must end in {' or '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise UserError(f"--plot {file}: there is no directory {file.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--plot: matplotlib is not installed: pip install 'megatron-mux[bench]'") from None


def traced(prediction: Prediction, title: str) -> Panel:
    """The panel of a step's stream: what is live and reserved, at no more than `_POINTS` moments.

    Of each run of events the moment with most bytes in use is drawn. What the process has outside the allocator is at
    the bottom.
    """
    stream, replay = prediction.stream, prediction.replay
    live, run = stream.live(), -(-len(stream) // _POINTS) or 1
    chosen = [
        max(range(begin, min(begin + run, len(stream))), key=live.__getitem__)
        for begin in range(0, len(stream), run)
    ]
    outside = prediction.process - prediction.peak_reserved
    columns: dict[str, Sequence[int]] = {CONTEXT: [outside] * len(chosen)} if outside else {}
    for number, category in enumerate(CATEGORIES):
        changes = [0] * len(stream)
        for index, code in enumerate(stream.codes):
            block = code if code >= 0 else ~code
            if stream.categories[block] == number:
                changes[index] = stream.sizes[block] if code >= 0 else -stream.sizes[block]
        totals = list(accumulate(changes))
        if any(totals):
            columns[str(category)] = [totals[index] for index in chosen]
    return Panel(title, (), columns, [replay.reserved[index] + outside for index in chosen])


def closed(title: str, instants: Mapping[str, Mapping[str, int]]) -> Panel:
    """The panel of what closed forms know: at each instant, by its name, the bytes by part."""
    parts = dict.fromkeys(part for found in instants.values() for part, size in found.items() if size)
    columns = {part: [found.get(part, 0) for found in instants.values()] for part in parts}
    return Panel(title, tuple(instants), columns)


def draw(panels: Sequence[Panel], title: str, limit: int, file: Path) -> None:
    """Draw predictions into a PNG or SVG file.

    Args:
        panels: At least one.
        title: Above all.
        limit: Bytes of a GPU.
        file: Where to.

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
    colours, top = _colours(panels), max(panel.top for panel in panels)
    near = limit <= _FAR * top
    for axes, panel in zip(grid.flat, panels, strict=False):
        _fill(axes, panel, colours)
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


def _fill(axes: Axes, panel: Panel, colours: Mapping[str, str]) -> None:
    """One panel."""
    totals = panel.totals
    times = range(len(totals))
    sizes = {part: [size / GIB for size in column] for part, column in panel.columns.items()}
    if panel.times:
        below = [0.0] * len(totals)
        for part, column in sizes.items():
            axes.bar(times, column, bottom=below, width=0.94, color=colours[part], label=part)
            below = [low + size for low, size in zip(below, column, strict=True)]
        axes.set_xlim(-_LEAST_WIDE / 2 if len(totals) == 1 else -0.6, max(len(totals) - 0.4, _LEAST_WIDE / 2))
        axes.set_xticks(times, [_wrapped(name) for name in panel.times], fontsize="x-small")
    else:
        drawn = [colours[part] for part in sizes]
        axes.stackplot(times, list(sizes.values()), labels=list(sizes), colors=drawn, step="post")
        axes.plot(
            times, [size / GIB for size in panel.reserved], color="black", linewidth=1, label="reserved"
        )
        axes.set_xlim(0, max(1, len(totals) - 1))
        axes.set_xticks([])
        axes.set_xlabel("the allocations and frees, first to last", fontsize="small")
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


def _colours(panels: Sequence[Panel]) -> dict[str, str]:
    """A colour for each part."""
    parts = dict.fromkeys(part for panel in panels for part in panel.columns)
    unknown = [part for part in parts if part not in _COLOURS]
    more = {part: _OTHERS[place % len(_OTHERS)] for place, part in enumerate(unknown)}
    return {part: _COLOURS.get(part) or more[part] for part in parts}


def _wrapped(name: str) -> str:
    """A moment's name in short lines."""
    lines = [""]
    for word in name.split():
        if len(lines[-1]) + len(word) > 12:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
