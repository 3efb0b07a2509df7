"""Parses and formats numbers of bytes."""

from __future__ import annotations

import re

MIB = 1 << 20
GIB = 1 << 30
MOST = 1 << 50
"""A pebibyte: no machine has more."""

_SIZE = re.compile(
    r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,30}(?:\.\d{1,30})?) ?(?:([KMGT])i?)?B?", re.IGNORECASE
)


def parse_size(text: str) -> int:
    """Bytes from `16GiB`, `16,384 MB`, `80GB`, `0.5g` or a plain number.

    Units are steps of 1,024 in every spelling, as vendors of GPUs (a "16 GB" one has 16,384 MiB), nvidia-smi and the
    papers count.

    Raises:
        ValueError: It is not a size, zero, or more than `MOST`; the message continues `--flag: `.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a size such as 16GiB or 24000MB, got {text!r}")
    number, unit = match.groups()
    found = int(float(number.replace(",", "")) * 1024 ** " KMGT".index((unit or " ").upper()))
    if found <= 0:
        raise ValueError(f"must be more than nothing, got {text!r}")
    if found > MOST:
        raise ValueError(f"must be at most {show_size(MOST)}, got {text!r}")
    return found


def show_size(count: float) -> str:
    """Bytes for people, such as `16.0 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
