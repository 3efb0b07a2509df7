"""The console that tables are printed on, and progress bars beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleDimensions

_FILE_WIDTH = 140
"""Columns where the output is no terminal but a file or a pipe."""


class _TerminalConsole(Console):
    """As large as the terminal that it writes to; rich asks the standard streams, which may be redirected."""

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        """Columns and lines."""
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            columns = lines = 0
        asked = self._width or self._height or {"COLUMNS", "LINES"} & os.environ.keys()
        return ConsoleDimensions(columns, lines) if columns and lines and not asked else super().size


def make_console(**options: Any) -> Console:
    """Make a console on standard output that does not cut tables to 80 columns in a file; `options` are rich's."""
    console = _TerminalConsole(**options)
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


@contextmanager
def progress_bar(
    what: str, shown: bool = True, in_bytes: bool = False, stays: bool = False
) -> Iterator[Callable[..., None]]:
    """Context with a progress bar on standard error, if that is a terminal.

    Args:
        what: The name of the work.
        shown: Whether this process shows it.
        in_bytes: Whether what is counted are bytes.
        stays: Whether it stays on the terminal once all is done.

    Yields:
        What is told how much is done, how much there is in all, and what was done last (empty: not said).
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    bar = Progress(
        *(TextColumn(what), BarColumn(), count, TimeRemainingColumn(), TextColumn("{task.fields[name]}")),
        console=Console(stderr=True),
        disable=not shown or not sys.stderr.isatty(),
        transient=not stays,
    )
    with bar:
        task = bar.add_task(what, total=None, name="")
        yield lambda done, total, name="": bar.update(task, completed=done, total=total, name=name)
