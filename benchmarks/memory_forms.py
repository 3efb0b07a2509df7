"""Closed forms of the engine's memory against dry runs: every family x adapter kind x {1x1, TP2, PP2}; of families
with experts, LoRA on attention, experts, shared experts and all of them x tensor, pipeline and expert ranks,
recomputation, an uneven placement with replicas under a skewed access profile, in three sizes.

python benchmarks/memory_forms.py                                       # a quarter of an hour on two cores
python benchmarks/memory_forms.py --family gemma3_text --kind VERA      # a part
python benchmarks/memory_forms.py --output benchmarks/results/memory-forms.json
python benchmarks/memory_forms.py --family mixtral --family qwen3_moe --family deepseek_v2 --family deepseek_v3 \
    --output benchmarks/results/memory-forms-experts.json

Models have four layers of width 512 (256 and 1,024 in the other sizes); a dry run executes the engine's own steps on a
fake GPU. The comparison is of the bytes of tensors at the peak, on the first rank of each stage; of a placement, on the
rank with most. Nothing is measured: the result is the same on every machine. `--merge` keeps what `--output` has of
other families. The exit status is 1 if any error exceeds `--tolerance`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from tests.end_to_end.memory_cells import Compared


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--family", action="append", help="a model_type; may be repeated (default: without experts)"
    )
    parser.add_argument("--kind", action="append", help="an adapter kind; may be repeated (default: all)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tolerance", type=float, default=0.04)
    add_output(parser)
    parser.add_argument("--merge", action="store_true", help="keep other families' results in --output")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Dry-run, compare and publish."""
    arguments = parse(argv)
    from megatron_mux.backbone.registry import DENSE
    from tests.end_to_end.memory_cells import all_cells, compared

    families = arguments.family or DENSE
    found: list[Compared] = []
    for family in families:  # family by family, to show progress
        cells = all_cells([family], *([arguments.kind] if arguments.kind else []), dtype=arguments.dtype)
        own = list(compared(cells))
        found += own
        for one in sorted(own, key=lambda one: -abs(one.off)):
            print(one, file=sys.stderr, flush=True)
    if not found:
        sys.exit(
            "memory_forms.py: no adapter kind that was asked for can be had on a family that was asked for"
        )
    if arguments.merge:
        found = [*_kept(arguments.output, families), *found]
    worst = max(found, key=lambda one: abs(one.off))
    publish(_result(found, worst), _markdown(found, worst), arguments.output)
    return int(abs(worst.off) > arguments.tolerance)


def _kept(output: Path | None, families: Sequence[str]) -> list[Compared]:
    """What a result has of other families than these."""
    if output is None or not output.exists():
        return []
    from tests.end_to_end.memory_cells import Cell, Compared

    cells = [cell for cell in json.loads(output.read_text())["cells"] if cell["family"] not in families]
    return [
        Compared(
            Cell(*(cell[name] for name in ("family", "kind", "division", "dtype")), size=cell["size"]),
            *(cell[name] for name in ("stage", "form_bytes", "dry_run_bytes", "at")),
        )
        for cell in cells
    ]


def _result(found: Sequence[Compared], worst: Compared) -> dict[str, Any]:
    return {
        "worst": str(worst),
        "median": statistics.median(abs(one.off) for one in found),
        "cells": [
            {
                "family": one.cell.family,
                "size": one.cell.size,
                "kind": one.cell.kind,
                "division": one.cell.division,
                "dtype": one.cell.dtype,
                "stage": one.stage,
                "form_bytes": one.form,
                "dry_run_bytes": one.dry_run,
                "off": one.off,
                "at": one.moment,
            }
            for one in found
        ],
    }


def _markdown(found: Sequence[Compared], worst: Compared) -> str:
    """Render a row for each family and kind, with a column for each stage of each division."""
    columns = list(dict.fromkeys((one.cell.division, one.stage) for one in found))
    rows: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    for one in found:
        family = " ".join(filter(None, (one.cell.family, one.cell.size)))
        rows.setdefault((family, one.cell.kind), {})[one.cell.division, one.stage] = one.off
    headings = " | ".join(("family", "adapter", *(f"{name}, stage {stage}" for name, stage in columns)))
    cells = (
        (*name, *(f"{own[column]:+.1%}" if column in own else "" for column in columns))
        for name, own in rows.items()
    )
    median = statistics.median(abs(one.off) for one in found)
    return "\n".join([*table(headings, cells), "", f"Worst: {worst}", "", f"Median of sizes: {median:.2%}"])


if __name__ == "__main__":
    sys.exit(main())
