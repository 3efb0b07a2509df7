"""A picture of a layer's subgraphs over time, when no other hybrid task hides its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from megatron_mux.fusion.subgraphs import LayerSubgraphs, Subgraph

_COLOURS = {"compute": "#56B4E9", "adapter": "#E69F00", "message": "#999999"}
_LEFT, _WIDTH, _LANE, _HEAD = 90, 1080, 30, 24


def timeline(subgraphs: Sequence[Subgraph]) -> Iterator[tuple[str, float, float, str]]:
    """Yield kind (`compute`, `adapter` or `message`), start and end in seconds, and text of everything that takes time.

    One subgraph is computed at a time, in order, and one message is on its way at a time.
    """
    clock = link_free = 0.0
    arrived: dict[int, float] = {}
    for index, subgraph in enumerate(subgraphs):
        start = max([clock, *(arrived[i] for i in subgraph.awaits)])
        clock = start + subgraph.seconds
        yield subgraph.kind, start, clock, f"{index}: {', '.join(subgraph.modules)}"
        if subgraph.message:
            begin = max(clock, link_free)
            arrived[index] = link_free = begin + subgraph.message_seconds
            yield "message", begin, link_free, f"{index}: {subgraph.message} of {subgraph.bytes} bytes"


def to_svg(layers: Sequence[LayerSubgraphs]) -> str:
    """Draw both passes of each kind of layer: a lane for computation, below it one for messages."""
    drawn = [
        (f"{str(own).partition(';')[0]}, {name}", list(timeline(subgraphs)))
        for own in layers
        for name, subgraphs in own.passes.items()
    ]
    span = max((end for _, spans in drawn for _, _, end, _ in spans), default=0.0) or 1.0
    parts: list[str] = []
    y = 0
    for title, spans in drawn:
        seconds = max(end for _, _, end, _ in spans)
        parts.append(f'<text x="8" y="{y + 18}">{escape(title)}: {seconds * 1e3:.4g} ms</text>')
        for lane, name in enumerate(("compute", "messages")):
            parts.append(f'<text x="8" y="{y + _HEAD + lane * _LANE + 19}">{name}</text>')
        parts += [_box(span, own, y + _HEAD) for own in spans]
        y += _HEAD + 2 * _LANE + 12
    for i, (kind, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 110 * i
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{kind}</text>')
    size = f'width="{_LEFT + _WIDTH + 20}" height="{y + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _box(span: float, own: tuple[str, float, float, str], top: int) -> str:
    kind, start, end, text = own
    x, width = _LEFT + start / span * _WIDTH, max((end - start) / span * _WIDTH, 1.0)
    y = top + _LANE * (kind == "message")
    number = text.partition(":")[0] if width > 14 else ""
    return (
        f"<g><title>{escape(text)}, {(end - start) * 1e3:.3g} ms</title>"
        f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_LANE - 6}" fill="{_COLOURS[kind]}" '
        f'stroke="white" stroke-width="0.6"/><text x="{x + width / 2:.1f}" y="{y + 19}" '
        f'text-anchor="middle">{number}</text></g>'
    )
