"""What all pictures as SVG have in common."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

# Colour-blind safe (Okabe-Ito).
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2", "#999999")
LEFT, WIDTH, RIGHT = 70, 1080, 100
"""Pixels: names of rows, the time axis, and what is written behind it."""


def text(value: str) -> str:
    """Escape text for XML."""
    return escape("".join(c if c.isprintable() else "?" for c in value))


def seconds(value: float) -> str:
    """Seconds, or milliseconds below one, for people."""
    return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"


def document(parts: Iterable[str], height: int) -> str:
    """A picture of these elements on white."""
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
