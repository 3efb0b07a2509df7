"""Compare what two commits answered: words as they are, numbers within a part of their value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MEASURED = re.compile(r"planning_s|seconds|built|measured")
"""Keys of numbers that a clock gave."""

_CHANGING = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\+0000|Z)?"), "TIME"),
    (re.compile(r"process \d+"), "process N"),
    (re.compile(r"\d+\.\d+ │"), "N │"),  # rates of a table on its way
    (re.compile(r"\b\d+(\.\d+)? (s|ms|seconds|tokens/s)\b"), "N s"),
)


def said(answer: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """An answer without what differs from run to run: its status, output (read, if it is JSON) and lines of errors.

    Args:
        answer: Of `ask`.
        places: Names of directories, to be written in their stead.
    """
    output, errors = (_plain(answer[key], places) for key in ("out", "err"))
    try:
        read = json.loads(output)
    except ValueError:
        read = output.splitlines()
    return {"status": answer["status"], "out": read, "err": errors.splitlines()}


def _plain(text: str, places: Mapping[str, str]) -> str:
    for place, name in places.items():
        text = text.replace(place, name)
    for pattern, word in _CHANGING:
        text = pattern.sub(word, text)
    return text


def apart(old: Any, new: Any, within: float, at: str = "") -> list[str]:
    """A line for each place where two answers differ.

    Args:
        old, new: Values as JSON has them.
        within: How far numbers may be apart, as a part of the old one.
        at: Where the values are.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        found = [f"{at}.{key}: only before" for key in old if key not in new]
        found += [f"{at}.{key}: only now" for key in new if key not in old]
        shared = [key for key in old if key in new and not MEASURED.search(key)]
        return found + [line for key in shared for line in apart(old[key], new[key], within, f"{at}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, (a, b) in pairs for line in apart(a, b, within, f"{at}[{i}]")]
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new))
    if numbers and abs(old - new) <= within * abs(old):
        return []
    if old == new:
        return []
    change = f" ({new / old - 1:+.2%})" if numbers and old else ""
    return [f"{at}: {_short(old)} -> {_short(new)}{change}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 160 else f"{text[:157]}..."
