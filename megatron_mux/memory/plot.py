"""Memory over time as a picture: bytes in use by category, stacked, with what the allocator has reserved above."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.memory.estimate import Prediction
from megatron_mux.memory.sizes import GIB
from megatron_mux.memory.stream.events import CATEGORIES

FORMATS = (".png", ".svg")
_POINTS = 4000
"""More events than a picture has columns are drawn as the most of each run of them."""
_COLOURS = {
    "parameters": "#4c72b0",
    "adapters": "#55a868",
    "gradients": "#c44e52",
    "optimizer": "#8172b2",
    "activations": "#ccb974",
    "logits": "#dd8452",
    "workspace": "#64b5cd",
    "communication": "#937860",
    "other": "#8c8c8c",
}


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


def draw(prediction: Prediction, title: str, file: Path) -> None:
    """Draw a prediction into a PNG or SVG file.

    Raises:
        UserError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns, reserved = series(prediction)
    times = range(len(reserved))
    figure, axes = pyplot.subplots(figsize=(9, 5))
    axes.stackplot(
        times,
        [[size / GIB for size in sizes] for sizes in columns.values()],
        labels=list(columns),
        colors=[_COLOURS[name] for name in columns],
        step="post",
    )
    axes.plot(times, [size / GIB for size in reserved], color="black", linewidth=1, label="reserved")
    axes.set_xlim(0, max(1, len(reserved) - 1))
    axes.set_ylim(bottom=0)
    axes.set_xticks([])
    axes.set_xlabel(f"allocations and frees of {len(prediction.stream):,} events, first to last")
    axes.set_ylabel("GiB")
    axes.set_title(title)
    axes.legend(loc="upper left", fontsize="small", ncols=2)
    figure.tight_layout()
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise UserError(f"--plot {file} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)


def series(prediction: Prediction) -> tuple[dict[str, list[int]], list[int]]:
    """What is drawn, at no more than `_POINTS` moments: of each run of events the moment with most bytes in use.

    Returns:
        Bytes asked for by category (those that occur), and bytes reserved.
    """
    stream, replay = prediction.stream, prediction.replay
    live, run = stream.live(), -(-len(stream) // _POINTS) or 1
    chosen = [
        max(range(begin, min(begin + run, len(stream))), key=live.__getitem__)
        for begin in range(0, len(stream), run)
    ]
    columns = {}
    for number, category in enumerate(CATEGORIES):
        changes = [0] * len(stream)
        for index, code in enumerate(stream.codes):
            block = code if code >= 0 else ~code
            if stream.categories[block] == number:
                changes[index] = stream.sizes[block] if code >= 0 else -stream.sizes[block]
        totals = list(accumulate(changes))
        if any(totals):
            columns[str(category)] = [totals[index] for index in chosen]
    return columns, [replay.reserved[index] for index in chosen]
