"""LLMem's Tables 2 and 3 next to the estimates of benchmarks/papers by its equations and by DNNMem's method.

python benchmarks/llmem_tables.py                                         # half a minute
python benchmarks/llmem_tables.py --output benchmarks/results/llmem.json  # the JSON, and the tables as llmem.md

Nothing is measured: the result is the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from benchmarks.papers.base_range import GPUS, LENGTH, Choices, Range, ranges_of_table
from benchmarks.papers.decision import OFFLOAD, layouts
from benchmarks.papers.dnnmem import DNNMem
from benchmarks.papers.llmem import Constants, LLMem
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.tensors import Skeleton
from tests.unit.memory.configs import TABLE_2, TABLE_3, skeleton

MAX_SEQUENCES = 200
"""Largest batch that is tried for Table 2; none of its models can have more."""
BASES = (0.5, 1, 2, 3, 4, 4.5, 5)
"""GiB of base memory at which Table 3 is compared; the paper does not publish its own."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Calculate and publish."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as directory:
        result = calculate({name: skeleton(name, Path(directory)) for name in (*TABLE_3, *TABLE_2)})
    publish(result, markdown(result), arguments.output)
    return 0


def calculate(models: Mapping[str, Skeleton]) -> dict[str, Any]:
    """Calculate all figures; sizes are in MiB."""
    choices = {m: Choices(LLMem(models[m].tensors, LENGTH, Constants(base_memory=0))) for m in TABLE_3}
    return {
        "base_memory": Constants().base_memory / MIB,
        "table_3": {name: _row_3(models[name]) for name in TABLE_3},
        "agreement": {str(base): _agreement(choices, base) for base in BASES},
        "base_ranges": {
            "all": _mib(ranges_of_table(choices, TABLE_3)),
            "models": {m: _mib(choices[m].ranges(wanted)) for m, wanted in TABLE_3.items()},
        },
        "table_2": {name: _row_2(models[name], TABLE_2[name]) for name in TABLE_2},
    }


def _agreement(choices: Mapping[str, Choices], base: float) -> list[str]:
    """Models for which LLMem's algorithm selects the published method, given `base` GiB of base memory."""
    return [
        name
        for name, wanted in TABLE_3.items()
        if choices[name].selected_method(round(base * 1024 * MIB)) == wanted
    ]


def _row_3(model: Skeleton) -> dict[str, Any]:
    forms = LLMem(model.tensors, LENGTH)
    choices = Choices(LLMem(model.tensors, LENGTH, Constants(base_memory=0)))
    base = forms.constants.base_memory
    return {
        "selected": choices.selected_method(base),
        "chunk_size": forms.chunk_size,
        "layouts": [
            {**asdict(layout), "name": layout.name, "largest_batch": choices.largest(layout, base)}
            for layout in layouts(GPUS)
        ],
    }


def _row_2(model: Skeleton, figures: tuple[int, int, int]) -> dict[str, Any]:
    """Estimates on one GPU at the batch nearest to LLMem's figure, and DNNMem's also at its own nearest batch."""
    theirs, dnnmem, measured = figures
    forms, graph = LLMem(model.tensors, LENGTH), DNNMem(model, LENGTH)
    batch = _nearest(lambda batch: forms.peak(layouts(1)[0], batch), theirs)
    own = _nearest(graph.peak, dnnmem)
    return {
        "published": theirs,
        "measured": measured,
        "batch": batch,
        "estimate": forms.peak(layouts(1)[0], batch) / MIB,
        "dnnmem_published": dnnmem,
        "dnnmem_estimate": graph.peak(batch) / MIB,
        "dnnmem_batch": own,
        "dnnmem_nearest": graph.peak(own) / MIB,
    }


def _nearest(peak: Callable[[int], int], wanted: float) -> int:
    return min(range(1, MAX_SEQUENCES), key=lambda batch: abs(peak(batch) / MIB - wanted))


def _mib(ranges: Sequence[Range]) -> list[tuple[float, float]]:
    return [(low / MIB, high / MIB) for low, high in ranges]


def markdown(result: Mapping[str, Any]) -> str:
    """Render the tables."""
    return "\n".join([*_table_3(result), "", *_ranges(result), "", *_table_2(result)])


def _table_3(result: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, row in result["table_3"].items():
        batches = [str(layout["largest_batch"] or "-") for layout in row["layouts"]]
        same = "yes" if row["selected"] == TABLE_3[name] else "**no**"
        chunk = f"{row['chunk_size'] / 2**20:.1f}"
        rows.append((name, _method_name(TABLE_3[name]), _method_name(row["selected"]), same, *batches, chunk))
    head = (
        f"**Table 3**: the method selected on {GPUS} GPUs of 16,384 MiB, sequences of {LENGTH} tokens, base memory "
        f"{result['base_memory']:.0f} MiB; and the largest batch per GPU with each method."
    )
    return [
        head,
        "",
        *table("model | LLMem | ours | same | CDP | ADP | 4TP | 2DP+2TP | chunk (2^20 values)", rows),
    ]


def _ranges(result: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(f"{len(found)} of 9 at {base} GiB" for base, found in result["agreement"].items())
    head = (
        f"The paper does not publish its base memory. The published method is selected for {counts}. Below: the base "
        "memories (MiB) for which it is selected, by model and for all nine models at once. A base memory fitted to "
        "the table would prove nothing."
    )
    ranges = result["base_ranges"]
    rows = [(name, _format_ranges(found)) for name, found in ranges["models"].items()]
    rows.append(("**all nine**", f"**{_format_ranges(ranges['all'])}**"))
    return [head, "", *table("model | base memory", rows)]


def _table_2(result: Mapping[str, Any]) -> list[str]:
    rows, others = [], []
    for name, row in result["table_2"].items():
        ours, theirs, measured = row["estimate"], row["published"], row["measured"]
        rows.append(
            (
                name,
                measured,
                theirs,
                row["batch"],
                f"{ours:.0f}",
                _deviation(ours, theirs),
                _deviation(ours, measured),
            )
        )
        found, nearest, wanted = row["dnnmem_estimate"], row["dnnmem_nearest"], row["dnnmem_published"]
        others.append(
            (
                name,
                wanted,
                row["batch"],
                f"{found:.0f}",
                _deviation(found, wanted),
                _deviation(found, measured),
            )
            + (row["dnnmem_batch"], f"{nearest:.0f}", _deviation(nearest, wanted))
        )
    head = (
        "**Table 2**: peak on one GPU in MiB. The paper does not publish the batch: we take the one whose estimate is "
        "nearest to LLMem's, so agreement within half a sequence's memory means little."
    )
    return [
        head,
        "",
        *table("model | measured | LLMem | batch | ours | against LLMem | against measured", rows),
        "",
        "DNNMem's estimates for the same batch, and for the batch whose estimate is nearest:",
        "",
        *table(
            "model | DNNMem | batch | ours | against DNNMem | against measured | nearest batch | ours | against DNNMem",
            others,
        ),
    ]


def _deviation(found: float, wanted: float) -> str:
    return f"{found / wanted - 1:+.1%}"


def _method_name(name: str) -> str:
    return "CPU offloading" if name == OFFLOAD else name


def _format_ranges(ranges: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{low:.1f} to {high:.1f}" for low, high in ranges) or "none"


if __name__ == "__main__":
    sys.exit(main())
