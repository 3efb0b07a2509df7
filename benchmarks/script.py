"""What all benchmark scripts share: common flags, what they were measured on, Markdown tables and result files.

It imports nothing heavy, so that a wrong flag is reported before torch is loaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))  # scripts are run by file path, from a checkout

QUICKSTART = ROOT / ".quickstart"
"""What `make prepare` makes: `backbone` and `data`."""


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser whose description is the first line of the script's docstring."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0], allow_abbrev=False)


def add_machine(parser: argparse.ArgumentParser, device: bool = True) -> None:
    """Add `--threads` and, unless the script runs on CPUs only, `--device`."""
    if device:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)


def add_backbone(parser: argparse.ArgumentParser) -> None:
    """Add `--backbone` and `--backbone-shape`, see `engine_bench.backbone_of`."""
    parser.add_argument("--backbone", type=Path, default=QUICKSTART / "backbone")
    parser.add_argument("--backbone-shape", choices=("tiny", "mid"), help="a random backbone instead")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add `--output`, which `publish` takes."""
    parser.add_argument("--output", type=Path, help="write the JSON here, and the table beside it as .md")


def publish(result: Mapping[str, Any], markdown: str, output: Path | None, as_json: bool = False) -> None:
    """Print the tables or the JSON; with `output`, also write the JSON there and the tables as .md beside it."""
    print(json.dumps(result, indent=1) if as_json else markdown)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
        output.with_suffix(".md").write_text(markdown + "\n")


def environment(
    backbone: str, dtype: str, threads: int, device: str = "cpu", packages: Sequence[str] = ("megatron-core",)
) -> dict[str, Any]:
    """Describe the backbone, the hardware and the versions, for `measured_on` and the result file."""
    import torch

    from megatron_mux.fusion.device import cpu_name

    on_gpu = device == "cuda"
    return {
        "backbone": backbone,
        "dtype": dtype.removeprefix("torch."),
        "hardware": torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, {threads} threads",
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", *packages)},
    }


def measured_on(result: Mapping[str, Any]) -> str:
    """Return the line above all tables: backbone, data type, hardware and versions, as `environment` describes them."""
    numbers = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"**{result['backbone']}** ({result['dtype']}) on {result['hardware']}. {numbers}."


def in_turns(functions: Sequence[Callable[[], object]], rounds: int, warm_up: int = 1) -> list[list[float]]:
    """Seconds of each function, called in turns, so that whatever goes on beside them affects all alike."""
    found: list[list[float]] = [[] for _ in functions]
    for turn in range(warm_up + rounds):
        for seconds, function in zip(found, functions, strict=True):
            start = time.perf_counter()
            function()
            if turn >= warm_up:
                seconds.append(time.perf_counter() - start)
    return found


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over turns of one's seconds over another's."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def table(headings: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table; `headings` are joined by ` | `."""
    columns = headings.count(" | ") + 1
    below = [" | ".join(map(str, row)) for row in rows]
    return [f"| {headings} |", "|" + "---|" * columns, *(f"| {row} |" for row in below)]
