"""Draws what one rank computed and sent over the first layers of a pass, as measured."""

from __future__ import annotations

from typing import Any

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f")
_WIDTH, _LANE, _LEFT, _GAP = 900, 26, 80, 34
_PIECES = 7
"""Pieces of each chain in the picture: three layers."""


def draw(case: dict[str, Any]) -> str:
    """An SVG of a forward and a backward pass of (e), each with a lane for computation and one for messages."""
    parts: list[str] = []
    top = 24
    for name, one in zip(("forward", "backward"), case["picture"], strict=False):
        parts += _pass(name, one, case["tasks"], top)
        top += 2 * _LANE + _GAP
    legend = "".join(
        f'<rect x="{_LEFT + 90 * i}" y="{top - 14}" width="12" height="12" fill="{_colour(i)}"/>'
        f'<text x="{_LEFT + 90 * i + 17}" y="{top - 4}">task {i}</text>'
        for i in range(case["tasks"])
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT + 20}" height="{top + 8}" '
        'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join([*parts, legend])
        + "\n</svg>\n"
    )


def _pass(name: str, one: dict[str, Any], tasks: int, top: int) -> list[str]:
    compute = one["compute"][: _PIECES * tasks]
    begin, end = compute[0][1], compute[-1][2]
    scale = _WIDTH / (end - begin)
    parts = [
        f'<text x="0" y="{top - 6}">{name}, first {1000 * (end - begin):.0f} ms</text>',
        f'<text x="0" y="{top + 16}">compute</text>',
        f'<text x="0" y="{top + _LANE + 16}">messages</text>',
    ]
    for lane, spans in enumerate((compute, _sent(one["messages"]))):
        for chain, start, stop in spans:
            if start < end:
                x, width = _LEFT + (start - begin) * scale, (min(stop, end) - start) * scale
                place = f'x="{x:.1f}" y="{top + lane * _LANE}" width="{width:.1f}" height="{_LANE - 6}"'
                parts.append(f'<rect {place} fill="{_colour(chain)}"/>')
    return parts


def _sent(messages: list[Any]) -> list[tuple[int, float, float]]:
    """When the link carried each message: it carries one at a time."""
    spans: list[tuple[int, float, float]] = []
    for chain, issued, arrived in sorted(messages, key=lambda own: own[1]):
        spans.append((chain, max(issued, spans[-1][2]) if spans else issued, arrived))
    return spans


def _colour(chain: int) -> str:
    return _COLOURS[chain % len(_COLOURS)]
