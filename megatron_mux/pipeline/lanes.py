"""Pairs of lanes: what a stage computes over time, and below it the messages that it exchanges meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_mux.pipeline.action import TimedAction, TimedPart
from megatron_mux.pipeline.svg import COLOURS, LEFT, WIDTH, document, seconds, text

_LANE, _HEAD, _GAP, _LINE = 30, 24, 12, 18
_NAMES = ("compute", "messages")
_PIECES = 7
"""Pieces of a batch that are drawn: three layers, without sequence parallelism."""


@dataclass(frozen=True)
class Span:
    """A box.

    Attributes:
        is_message: Whether it is on the lane for messages.
        start, stop: Seconds.
        colour: `#rrggbb`.
        hint: Shown when the pointer is over it.
        number: Written into it if there is room.
    """

    is_message: bool
    start: float
    stop: float
    colour: str
    hint: str
    number: str = ""


@dataclass(frozen=True)
class Lanes:
    """A pair of lanes.

    Attributes:
        spans: Its boxes; time begins at zero.
    """

    title: str
    spans: Sequence[Span]


def draw(rows: Sequence[Lanes], legend: Mapping[str, str], top: int = 0) -> tuple[list[str], int]:
    """Draw pairs of lanes below each other, on one scale.

    Args:
        rows: From top to bottom.
        legend: Colours, by what they stand for.
        top: Where to begin, in pixels.

    Returns:
        SVG elements, and where they end.
    """
    whole = max((span.stop for row in rows for span in row.spans), default=0.0) or 1.0
    parts: list[str] = []
    for row in rows:
        parts.append(f'<text x="8" y="{top + 18}">{text(row.title)}</text>')
        for lane, name in enumerate(_NAMES):
            y = top + _HEAD + lane * _LANE
            parts.append(f'<text x="8" y="{y + 19}">{name}</text>')
            parts.append(
                f'<rect x="{LEFT}" y="{y + 3}" width="{WIDTH}" height="{_LANE - 6}" fill="#f4f4f4"/>'
            )
        parts += [_box(span, whole, top + _HEAD) for span in row.spans]
        top += _HEAD + len(_NAMES) * _LANE + _GAP
    for name, colour in legend.items():
        parts.append(f'<rect x="{LEFT}" y="{top}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 18}" y="{top + 11}">{text(name)}</text>')
        top += _LINE
    return parts, top


def _box(span: Span, whole: float, top: int) -> str:
    x, width = LEFT + span.start / whole * WIDTH, max((span.stop - span.start) / whole * WIDTH, 1.0)
    y = top + _LANE * span.is_message
    number = span.number if width > 14 else ""
    return (
        f"<g><title>{text(span.hint)}: {seconds(span.stop - span.start)}</title>"
        f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_LANE - 6}" fill="{span.colour}" '
        f'stroke="white" stroke-width="0.6"/><text x="{x + width / 2:.1f}" y="{y + 19}" '
        f'text-anchor="middle">{text(number)}</text></g>'
    )


def draw_passes(schedules: Mapping[str, Sequence[TimedAction]], top: int = 0) -> tuple[list[str], int]:
    """Draw the first layers of a forward and a backward pass of each stage whose batches are computed in turns.

    Args:
        schedules: By name: passes of the same stage and direction are below each other.
        top: See `draw`.

    Returns:
        See `draw`; nothing if no batches are computed in turns.
    """
    passes = list(_passes(schedules))
    seen = sorted({(part.batch, part.label) for _, timed in passes for part in timed.parts})
    legend = {f"{batch}: {label}": _colour(batch) for batch, label in seen}
    return draw([_first_layers(name, timed) for name, timed in passes], legend, top)


def passes_to_svg(actions: Sequence[TimedAction]) -> str:
    """A picture of `draw_passes` alone."""
    parts, height = draw_passes({"": actions})
    return document(parts, height + _GAP)


def _passes(schedules: Mapping[str, Sequence[TimedAction]]) -> Iterator[tuple[str, TimedAction]]:
    """For each stage and direction, and each schedule by name, the last pass with the most batches."""
    best: dict[tuple[int, bool, str], TimedAction] = {}
    names = list(schedules)
    for name, actions in schedules.items():
        for timed in (action for action in actions if action.parts):
            key = (timed.action.stage, timed.action.is_backward, name)
            if key not in best or _size(timed) > _size(best[key]):
                best[key] = timed
    for stage, backward, name in sorted(best, key=lambda key: (*key[:2], names.index(key[2]))):
        yield name, best[stage, backward, name]


def _size(timed: TimedAction) -> tuple[object, ...]:
    return len({part.batch for part in timed.parts}), timed.action.chunk_id


def _first_layers(name: str, timed: TimedAction) -> Lanes:
    batches = len({part.batch for part in timed.parts})
    pieces = sorted((part for part in timed.parts if not part.message), key=lambda part: part.start)
    begin, end = pieces[0].start, pieces[: _PIECES * batches][-1].stop
    whole = max(part.stop for part in timed.parts) - begin
    direction = "backward" if timed.action.is_backward else "forward"
    what = f"stage {timed.action.stage}, {direction} {timed.action}{f', {name}' if name else ''}"
    shown = f"first {seconds(end - begin)} of {seconds(whole)}" if whole > end - begin else seconds(whole)
    spans = [_span(part, begin, end) for part in timed.parts if part.start < end]
    return Lanes(f"{what}: {shown}", spans)


def _span(part: TimedPart, begin: float, end: float) -> Span:
    what = part.message or "piece"
    hint = f"{part.label}: {what} {part.piece}"
    start, stop = part.start - begin, min(part.stop, end) - begin
    return Span(bool(part.message), start, stop, _colour(part.batch), hint, str(part.batch))


def _colour(batch: int) -> str:
    return COLOURS[batch % len(COLOURS)]
