"""The console that tables are printed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

_FILE_WIDTH = 140
"""Columns where the output is no terminal but a file or a pipe."""


def make_console(**options: Any) -> Console:
    """Make a console on standard output that does not cut tables to 80 columns in a file; `options` are rich's."""
    console = Console(**options)
    return console if console.is_terminal else Console(width=_FILE_WIDTH, **options)


def print_result(title: str, cells: Mapping[str, str], *lines: str) -> None:
    """Print a table of one row, and lines below it.

    Args:
        title: Of the table.
        cells: By their headings.
        lines: Such as where the result is.
    """
    from rich.table import Column, Table

    table = Table(*(Column(heading, justify="right") for heading in cells), title=title, title_justify="left")
    table.add_row(*cells.values())
    console = make_console()
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
