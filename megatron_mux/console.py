"""The console that tables are printed on."""

from __future__ import annotations

from typing import Any

from rich.console import Console

_FILE_WIDTH = 140
"""Columns where the output is no terminal but a file or a pipe."""


def make_console(**options: Any) -> Console:
    """Make a console on standard output that does not cut tables to 80 columns in a file; `options` are rich's."""
    console = Console(**options)
    return console if console.is_terminal else Console(width=_FILE_WIDTH, **options)
