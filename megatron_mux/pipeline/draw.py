"""Pictures of schedules as SVG, for people. `trace.py` writes them for zooming in.

In the grids a bucket has the same colour in every picture of a run, simulated or measured: colours depend on the
labels only, not on what ran first. Labels with a task in common share a colour, since a task is in one bucket, and
differ by hatching.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_mux.pipeline import svg
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.pipeline.lanes import draw_passes
from megatron_mux.pipeline.svg import COLOURS, LEFT, WIDTH

Schedules = Sequence[TimedAction] | Mapping[str, Sequence[TimedAction]]
"""Actions of all stages on one clock (seconds): one schedule, or several by name, each on its own clock."""

_FILL = {"F": 1.0, "B": 0.68}
"""Brightness of a pass's colour. All other actions are short and drawn as narrow black ticks."""
_TICK = "#222222"
_LEAST = 1e-9
"""Shortest duration in seconds that can be drawn."""
# Angle of the lines in degrees, and whether others cross them.
_HATCHES = ((45, False), (135, False), (45, True), (0, False), (90, False), (0, True))
_ROW, _HEAD, _NAME, _LINE = 80, 34, 22, 18
_FONT, _LETTER = 11.5, 6.6
"""Pixels: height of a line of text in a box, and width of a letter."""
_TICKS = {"N": "gradient norms of a bucket's tasks", "U": "optimizer steps"}
"""What the black lines stand for."""


@dataclass(frozen=True)
class Style:
    """How a label's passes are drawn.

    Attributes:
        colour: Colour of a forward pass, `#rrggbb`.
        hatch: 0 for none, else the index of the hatching that tells it from other labels of the same colour.
    """

    colour: str
    hatch: int

    def fill(self, kind: str) -> str:
        """The SVG paint of a pass, `F` or `B`."""
        shade = _shade(self.colour, _FILL[kind])
        return f"url(#{self._pattern_id(shade)})" if self.hatch else shade

    def patterns(self) -> Iterator[str]:
        """The SVG definitions that the paints refer to."""
        if not self.hatch:
            return
        coarser, which = divmod(self.hatch - 1, len(_HATCHES))
        angle, crossed = _HATCHES[which]
        size = 7 + 5 * coarser
        lines = f"M{size / 2} 0V{size}" + (f"M0 {size / 2}H{size}" if crossed else "")
        for brightness in _FILL.values():
            shade = _shade(self.colour, brightness)
            yield (
                f'<pattern id="{self._pattern_id(shade)}" patternUnits="userSpaceOnUse" width="{size}" '
                f'height="{size}" patternTransform="rotate({angle})"><rect width="{size}" height="{size}" '
                f'fill="{shade}"/><path d="{lines}" stroke="black" stroke-opacity="0.35" stroke-width="1.6"/></pattern>'
            )

    def _pattern_id(self, shade: str) -> str:
        # The id names everything in the pattern, so that pictures on one page cannot use each other's.
        return f"hatch{self.hatch}-{shade[1:]}"


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Choose a style for each label; it depends on the set of labels only, not on their order in time.

    Args:
        labels: Labels of actions: task names joined by `+` within a hybrid task and by `|` between hybrid tasks.

    Returns:
        The style of every label. Of labels that share a colour, the one with the most tasks is not hatched.
    """
    everything = sorted(set(labels))
    bucket_of: dict[str, frozenset[str]] = {}
    for label in everything:
        together = tasks_of(label).union(*(bucket_of.get(task, frozenset()) for task in tasks_of(label)))
        bucket_of.update(dict.fromkeys(together, together))
    # Larger groups have replaced the smaller ones they grew from, so each task is in exactly one group.
    buckets = sorted(set(bucket_of.values()), key=min)
    of_colour: dict[str, list[tuple[bool, int, int, str]]] = {colour: [] for colour in COLOURS}
    for i, bucket in enumerate(buckets):
        combined = sorted((-len(tasks_of(label)), label) for label in everything if tasks_of(label) <= bucket)
        for place, (size, label) in enumerate(combined):
            # Parts of buckets come last, so that they do not change the style of whole buckets.
            of_colour[COLOURS[i % len(COLOURS)]].append((place > 0, i, size, label))
    return {
        label: Style(colour, hatch)
        for colour, entries in of_colour.items()
        for hatch, (_, _, _, label) in enumerate(sorted(entries))
    }


def tasks_of(label: str) -> frozenset[str]:
    """The task names in a label."""
    return frozenset(part.strip() for part in re.split(r"[+|]", label))


def latency(actions: Sequence[TimedAction]) -> float:
    """Seconds from the first action's start to the last one's end."""
    return max((t.stop for t in actions), default=0.0) - min((t.start for t in actions), default=0.0)


def stages_of(actions: Iterable[TimedAction]) -> int:
    """Number of stages in a schedule."""
    return max((timed.action.stage for timed in actions), default=0) + 1


def busy(actions: Sequence[TimedAction], ranks: int = 0) -> list[float]:
    """Seconds during which each rank computes."""
    rows = ranks or stages_of(actions)
    seconds = [0.0] * rows
    for timed in actions:
        seconds[timed.action.stage % rows] += timed.stop - timed.start
    return seconds


def bubble(actions: Sequence[TimedAction], ranks: int = 0) -> list[float]:
    """Share of the latency during which each rank is idle; see `busy`."""
    whole = latency(actions)
    return [1 - seconds / whole if whole else 0.0 for seconds in busy(actions, ranks)]


def to_svg(actions: Schedules, title: str, ranks: int = 0) -> str:
    """Draw one row per rank, with time to the right; several schedules below each other on one scale.

    Below it: lanes of pieces and messages, for passes whose batches are computed in turns.

    Args:
        actions: One schedule, or several by name.

    Returns:
        The SVG document.
    """
    schedules = named(actions)
    drawn = pass_styles(schedules)
    span = max((latency(schedule) for schedule in schedules.values()), default=0.0)
    span = span if span > _LEAST else 1.0
    parts: list[str] = []
    y = _HEAD
    for name, schedule in schedules.items():
        head = y - _HEAD + 20  # the title's own line, if the schedule has no name
        if name:
            y += _NAME
            head = y - 6
            parts.append(f'<text x="8" y="{head}" font-weight="bold">{svg.text(name)}</text>')
        end = LEFT + WIDTH
        parts.append(f'<text x="{end}" y="{head}" text-anchor="end">{svg.seconds(latency(schedule))}</text>')
        parts += _rows(schedule, y, span, drawn, ranks)
        y += len(busy(schedule, ranks)) * _ROW
    parts += _axis(y, span)
    foot = _legend([t for schedule in schedules.values() for t in schedule], y + 28, drawn)
    patterns = "".join(pattern for style in drawn.values() for pattern in style.patterns())
    heads = [f"<defs>{patterns}</defs>"] if patterns else []
    heads.append(f'<text x="8" y="20" font-size="14">{svg.text(title)}</text>')
    lanes, height = draw_passes(schedules, y + 28 + _LINE * len(foot))
    return svg.document([*heads, *parts, *foot, *lanes], height)


def named(actions: Schedules) -> dict[str, Sequence[TimedAction]]:
    """Schedules by name; one alone has none."""
    return dict(actions) if isinstance(actions, Mapping) else {"": actions}


def pass_styles(schedules: Mapping[str, Sequence[TimedAction]]) -> dict[str, Style]:
    """Styles of the passes' labels. Ticks have no colour, so their labels must not affect the passes."""
    return styles(t.label for s in schedules.values() for t in s if t.action.kind in _FILL)


def _rows(
    schedule: Sequence[TimedAction], top: int, span: float, drawn: Mapping[str, Style], ranks: int
) -> Iterator[str]:
    begin = min((t.start for t in schedule), default=0.0)
    shares = bubble(schedule, ranks)
    for row, idle in enumerate(shares):
        y = top + row * _ROW
        yield f'<text x="8" y="{y + _ROW / 2 + 4}">{row_name(row, len(shares), schedule)}</text>'
        yield f'<rect x="{LEFT}" y="{y + 4}" width="{WIDTH}" height="{_ROW - 8}" fill="#f4f4f4"/>'
        yield f'<text x="{LEFT + WIDTH + 8}" y="{y + _ROW / 2 + 4}">{idle:.1%} bubble</text>'
    # Ticks are drawn on top: the actions are narrower than their ticks.
    for timed in sorted(schedule, key=lambda t: (t.action.kind not in _FILL, t.start)):
        yield _box(timed, top + timed.action.stage % len(shares) * _ROW, begin, span, drawn)


def row_name(row: int, rows: int, schedule: Iterable[TimedAction]) -> str:
    """Text that names a rank by its stages."""
    stages = range(row, stages_of(schedule), rows)
    return f"stage {row}" if len(stages) < 2 else f"stages {','.join(map(str, stages))}"


def _box(timed: TimedAction, row: int, begin: float, span: float, drawn: Mapping[str, Style]) -> str:
    action = timed.action
    tick = action.kind not in _FILL
    x = LEFT + (timed.start - begin) / span * WIDTH
    width = max((timed.stop - timed.start) / span * WIDTH, 2.0 if tick else 1.0)
    y = row + 4
    fill = _TICK if tick else drawn[timed.label].fill(action.kind)
    edge = "" if tick else ' stroke="white" stroke-width="0.6"'
    hint = f"{action} {timed.label}: {(timed.stop - timed.start) * 1e3:.1f} ms"
    return (
        f'<g><title>{svg.text(hint)}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 8}" '
        f'fill="{fill}"{edge}/>{"" if tick else _names(timed, x, y, width)}</g>'
    )


def _names(timed: TimedAction, x: float, y: float, width: float) -> str:
    """The tasks of a pass in its box, a line each; upright lines, cut if they are long, where the box is narrow."""
    names = [name.strip() for name in re.split(r"[+|]", timed.label)]
    height, middle, colour = _ROW - 8, x + width / 2, "white" if timed.action.is_backward else "black"
    if len(names) * _FONT <= height and max(map(len, names)) * _LETTER + 6 <= width:
        top = y + height / 2 - len(names) * _FONT / 2 + 10
        places = [f'x="{middle:.1f}" y="{top + i * _FONT:.1f}"' for i in range(len(names))]
    else:
        room = int(width / _FONT)
        if room < len(names):  # as many as there is room for, and how many more there are
            names = [*names[: room - 1], f"+{len(names) - room + 1}"] if room > 1 else []
        most = int((height - 4) / _LETTER)
        names = [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]
        first, centre = middle - len(names) * _FONT / 2 + 10, y + height / 2
        ends = [first + i * _FONT for i in range(len(names))]
        places = [f'transform="translate({end:.1f} {centre:.1f}) rotate(-90)"' for end in ends]
    return "".join(
        f'<text {place} font-size="11" text-anchor="middle" fill="{colour}">{svg.text(name)}</text>'
        for name, place in zip(names, places, strict=True)
    )


def _axis(y: int, span: float) -> Iterator[str]:
    """The time axis below the rows, with round numbers of seconds or milliseconds."""
    scale, unit = (1.0, "s") if span >= 1 else (1e3, "ms")
    power = 10.0 ** math.floor(math.log10(span / 8))
    step = next((m * power for m in (1, 2, 5) if span / (m * power) <= 8), 10 * power)
    for i in range(int(span / step * (1 + 1e-9)) + 1):
        x = LEFT + i * step / span * WIDTH
        yield f'<path d="M{x:.1f} {y}v4" stroke="black"/>'
        yield f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{i * step * scale:.6g} {unit}</text>'


def _legend(actions: Sequence[TimedAction], top: int, drawn: Mapping[str, Style]) -> list[str]:
    """One line for each label of a pass, in the order of colours, and one that explains shades."""
    seen = {t.label for t in actions if t.action.kind in _FILL}
    lines: list[str] = []
    for label in (label for label in drawn if label in seen):
        y = top + _LINE * len(lines)
        squares = "".join(
            f'<rect x="{LEFT + 14 * i}" y="{y}" width="12" height="12" fill="{drawn[label].fill(kind)}"/>'
            for i, kind in enumerate(_FILL)
        )
        lines.append(f'{squares}<text x="{LEFT + 32}" y="{y + 11}">{svg.text(label)}</text>')
    others = [text for kind, text in _TICKS.items() if any(t.action.kind == kind for t in actions)]
    if actions:
        text = "light: forward pass of a micro-batch, dark: backward pass"
        text += f", black lines: {', '.join(others)}" if others else ""
        lines.append(f'<text x="{LEFT}" y="{top + _LINE * len(lines) + 11}">{text}</text>')
    return lines


def _shade(colour: str, brightness: float) -> str:
    red, green, blue = (int(int(colour[i : i + 2], 16) * brightness) for i in (1, 3, 5))
    return f"#{red:02x}{green:02x}{blue:02x}"
