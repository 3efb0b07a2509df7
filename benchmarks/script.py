"""What all benchmark scripts share: common flags, Markdown tables and result files.

It imports nothing heavy, so that a wrong flag is reported before torch is loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser whose description is the first line of the script's docstring."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0], allow_abbrev=False)


def add_machine(parser: argparse.ArgumentParser, device: bool = True) -> None:
    """Add `--threads` and, unless the script runs on CPUs only, `--device`."""
    if device:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add `--output`, which `publish` takes."""
    parser.add_argument("--output", type=Path, help="write the JSON here, and the table beside it as .md")


def publish(result: Mapping[str, Any], markdown: str, output: Path | None, as_json: bool = False) -> None:
    """Print the tables or the JSON; with `output`, also write the JSON there and the tables as .md beside it."""
    print(json.dumps(result, indent=1) if as_json else markdown)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
        output.with_suffix(".md").write_text(markdown + "\n")


def measured_on(backbone: str, dtype: str, hardware: str, versions: Mapping[str, str]) -> str:
    """Return the line above all tables: backbone, data type, hardware and versions."""
    numbers = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"**{backbone}** ({dtype}) on {hardware}. {numbers}."


def table(headings: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table; `headings` are joined by ` | `."""
    columns = headings.count(" | ") + 1
    below = [" | ".join(map(str, row)) for row in rows]
    return [f"| {headings} |", "|" + "---|" * columns, *(f"| {row} |" for row in below)]
