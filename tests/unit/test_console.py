"""The console that tables are printed on."""

from __future__ import annotations

import io

from rich.table import Table

from megatron_mux.console import make_console


def test_tables_are_not_cut_in_a_file() -> None:
    file = io.StringIO()
    table = Table("a" * 50, "b" * 50)
    make_console(file=file).print(table)
    assert "a" * 50 in file.getvalue() and "b" * 50 in file.getvalue()
