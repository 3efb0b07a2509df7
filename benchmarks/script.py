"""What every script here has: its flags, its tables, and the files it leaves.

Nothing heavy is imported: flags are read, and what is wrong with them said, before torch is loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser that describes the script by the first line of its docstring."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0], allow_abbrev=False)


def add_machine(parser: argparse.ArgumentParser, device: bool = True) -> None:
    """What is measured on: `--device`, unless the script is for CPUs only, and `--threads`."""
    if device:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)


def add_output(parser: argparse.ArgumentParser) -> None:
    """`--output`, for `publish`."""
    parser.add_argument("--output", type=Path, help="write the JSON here, and the table beside it as .md")


def publish(result: Mapping[str, Any], markdown: str, output: Path | None) -> None:
    """Print the tables; leave the result as JSON and the tables as .md beside it, if a place is given."""
    print(markdown)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
        output.with_suffix(".md").write_text(markdown + "\n")


def measured_on(backbone: str, dtype: str, hardware: str, versions: Mapping[str, str]) -> str:
    """The line above all tables."""
    numbers = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"**{backbone}** ({dtype}) on {hardware}. {numbers}."


def table(headings: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown; headings are given as they will stand there, `a | b`."""
    columns = headings.count(" | ") + 1
    below = [" | ".join(map(str, row)) for row in rows]
    return [f"| {headings} |", "|" + "---|" * columns, *(f"| {row} |" for row in below)]
