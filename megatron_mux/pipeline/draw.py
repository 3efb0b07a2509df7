"""Pictures of a schedule: an SVG for people, a Chrome/Perfetto trace for zooming in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.sax.saxutils import escape

from megatron_mux.pipeline.action import TimedAction

# Colour-blind safe (Okabe-Ito); a backward pass has the darker shade of its forward's colour.
_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2", "#999999")
_ROW, _LEFT, _WIDTH, _HEAD = 44, 70, 1080, 34


def to_svg(actions: Sequence[TimedAction], title: str) -> str:
    """Draw one row per stage, time to the right.

    Args:
        actions: What ran on every stage, on one clock (seconds).
        title: Written above.

    Returns:
        The SVG document.
    """
    stages = max((t.action.stage for t in actions), default=0) + 1
    begin = min((t.start for t in actions), default=0.0)
    span = max((t.stop for t in actions), default=1.0) - begin or 1.0
    labels = list(dict.fromkeys(t.label for t in sorted(actions, key=lambda t: t.start)))
    colours = {label: _COLOURS[i % len(_COLOURS)] for i, label in enumerate(labels)}
    height = _HEAD + stages * _ROW + 26 + 18 * len(labels)
    size = f'width="{_LEFT + _WIDTH + 20}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for stage in range(stages):
        y = _HEAD + stage * _ROW
        parts.append(f'<text x="8" y="{y + 24}">stage {stage}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 4}" width="{_WIDTH}" height="{_ROW - 8}" fill="#f4f4f4"/>')
    for timed in sorted(actions, key=lambda t: t.start):
        parts.append(_box(timed, begin, span, colours[timed.label]))
    foot = _HEAD + stages * _ROW + 16
    parts.append(f'<text x="{_LEFT}" y="{foot}">0 s</text>')
    parts.append(f'<text x="{_LEFT + _WIDTH}" y="{foot}" text-anchor="end">{span:.3f} s</text>')
    for i, label in enumerate(labels):
        y = foot + 10 + 18 * i
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="12" height="12" fill="{colours[label]}"/>')
        parts.append(
            f'<text x="{_LEFT + 18}" y="{y + 11}">{escape(label)} (light: forward, dark: backward)</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _box(timed: TimedAction, begin: float, span: float, colour: str) -> str:
    x = _LEFT + (timed.start - begin) / span * _WIDTH
    width = max((timed.stop - timed.start) / span * _WIDTH, 1.0)
    y = _HEAD + timed.action.stage * _ROW + 4
    fill = _darker(colour) if timed.action.kind == "B" else colour
    number = str(timed.action.micro_batch) if width > 12 else ""
    hint = f"{timed.action} {timed.label}: {(timed.stop - timed.start) * 1e3:.1f} ms"
    return (
        f'<g><title>{escape(hint)}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 8}" '
        f'fill="{fill}" stroke="white" stroke-width="0.6"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 23}" text-anchor="middle">{number}</text></g>'
    )


def _darker(colour: str) -> str:
    red, green, blue = (int(int(colour[i : i + 2], 16) * 0.68) for i in (1, 3, 5))
    return f"#{red:02x}{green:02x}{blue:02x}"


def to_trace(actions: Sequence[TimedAction]) -> str:
    """The same as a Chrome trace (open it in Perfetto or chrome://tracing).

    Args:
        actions: What ran on every stage, on one clock (seconds).

    Returns:
        JSON text.
    """
    begin = min((t.start for t in actions), default=0.0)
    events = [
        {
            "name": f"{timed.action.kind} {timed.label}",
            "cat": "forward" if timed.action.kind == "F" else "backward",
            "ph": "X",
            "ts": (timed.start - begin) * 1e6,
            "dur": (timed.stop - timed.start) * 1e6,
            "pid": 0,
            "tid": timed.action.stage,
            "args": {"action": str(timed.action)},
        }
        for timed in actions
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in sorted({timed.action.stage for timed in actions})
    ]
    return json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}) + "\n"
