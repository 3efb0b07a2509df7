"""Tables of bytes against the peaks of `gpu_table.py` on a GPU: no figure of the tables is fitted to them.

    python benchmarks/gpu_peaks.py --output benchmarks/results/gpu-peaks-h200.json        # two minutes, without a GPU

Each row of the main table trained in one process, beside the model of `transformers` whose weights it copied; its peak
is torch's `max_memory_allocated`. Predicted is that model, what tables say of the heaviest of the steps that were
measured, and two workspaces of cuBLAS. The exit status is 1 if an error exceeds `--tolerance`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

GIB = 1 << 30


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    default = Path(__file__).with_name("results") / "gpu-table-h200.json"
    parser.add_argument("--measured", type=Path, default=default, help="result of gpu_table.py")
    parser.add_argument("--tolerance", type=float, default=0.03)
    parser.add_argument("--only", metavar="WORD", default="", help="only rows whose name contains it")
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict every row that was measured."""
    arguments = parse(argv)
    measured = json.loads(arguments.measured.read_text())
    from gpu_rows import ROWS

    sides = {name: own["sides"].get("mux", {}) for name, own in measured["rows"].items()}
    rows = [row for row in ROWS if "seconds" in sides.get(row.name, {}) and arguments.only in row.name]
    if not rows:
        print(
            f"gpu_peaks.py: {arguments.measured} has no measured row with {arguments.only!r} in its name",
            file=sys.stderr,
        )
        return 2
    machine = measured["about"]["machine"]
    found = {}
    for row in rows:
        predicted = _predicted(row, sides[row.name], machine["gpu"])
        found[row.name] = {"measured": sides[row.name]["peak_bytes"], "predicted": predicted}
        print(row.name, found[row.name], file=sys.stderr, flush=True)
    publish({"measured_on": measured["about"], "rows": found}, _markdown(found, measured), arguments.output)
    return int(any(abs(_off(own)) > arguments.tolerance for own in found.values()))


def _predicted(row: Any, side: Mapping[str, Any], device: str) -> int:
    """Bytes at the peak of a row's steps."""
    import gpu_sides
    import numpy as np

    from megatron_mux.dry_run.depth import read_info
    from megatron_mux.dry_run.run_spec import RunSpec
    from megatron_mux.estimate.tables import Tables
    from megatron_mux.footprint.signature import Signature
    from megatron_mux.fusion.plan import plan_for
    from megatron_mux.fusion.planner.load import persistent_share
    from megatron_mux.gpus import assumed
    from megatron_mux.memory.untraced import THREADS, cublas_of

    work = gpu_sides.Work(row)
    config = json.loads(work.config.to_json_string(use_diff=False))
    plan = plan_for("spatial", {spec.name: 1 for spec in work.specs}, 1, 1, row.chunk)
    gpu = assumed(device)[0].gpu
    run = RunSpec(config, (), plan, gpu=gpu, quantise=row.quantise)
    signatures = {spec.name: Signature.of(spec.plain()) for spec in work.specs}
    distinct = sorted(set(signatures.values()))
    memory = Tables(run).memory(distinct)
    columns = {name: distinct.index(own) for name, own in signatures.items()}
    shape = read_info(config, row.quantise).shape
    counts = np.zeros(len(distinct))
    for spec in work.specs:
        counts[columns[spec.name]] += persistent_share(spec, shape, signatures[spec.name])
    steps = _steps_measured(row, side)
    passes = max(_step_bytes(work, plan, number, columns, memory) for number in range(steps))
    model = 2 * _parameters(work.config)
    most = max(passes, float(memory.updating(counts)[0]))
    return int(model + memory.persistent(counts)[0] + most + THREADS * cublas_of(gpu))


def _steps_measured(row: Any, side: Mapping[str, Any]) -> int:
    """Steps that a side ran: fewer where they are slow, see `gpu_sides.Meter`."""
    from gpu_sides import TURNS, WARM_UP

    turns = len(side["seconds"])
    return (WARM_UP if turns == TURNS else 2) + turns * row.burst + side["gpu"]["steps"]


def _step_bytes(work: Any, plan: Any, number: int, columns: Mapping[str, int], memory: Any) -> float:
    """The most that a step's chunks hold at a time: all go forward, then backward in the reverse order."""
    from megatron_mux.fusion.contents import contents_of
    from megatron_mux.fusion.step import Lengths, step_chunks

    lengths = {}
    for spec, own in zip(work.specs, work.step(number), strict=True):
        labels = tuple(int(labelled[1:].sum()) for _, labelled in own)
        lengths[spec.name] = Lengths(tuple(len(ids) for ids, _ in own), labels)
    chunked = step_chunks(plan, lengths)
    micro_batches = [
        [piece for chunk in chunked.chunks[chunk_id] for piece in chunk]
        for chunk_id in sorted(chunked.chunks)
    ]
    contents = contents_of(micro_batches, lengths, columns, len(set(columns.values())), "cuda")
    taken = memory.passes(contents)
    return float((taken.kept.cumsum(axis=0) + taken.working).max())


def _parameters(config: Any) -> int:
    """Of the model of `transformers`."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(own.numel() for own in model.parameters())


def _off(own: Mapping[str, float]) -> float:
    return own["predicted"] / own["measured"] - 1


def _markdown(found: Mapping[str, Mapping[str, float]], measured: Mapping[str, Any]) -> str:
    about = measured["about"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    off = [abs(_off(own)) for own in found.values()]
    rows = [
        (name, f"{own['measured'] / GIB:.3f}", f"{own['predicted'] / GIB:.3f}", f"{_off(own):+.2%}")
        for name, own in found.items()
    ]
    lines = [
        f"Measured on an {about['machine']['gpu']} ({versions}); predicted without a GPU.",
        f"Median error {statistics.median(off):.2%}, worst {max(off):.2%}.",
        "",
        *table("tasks | peak measured (GiB) | predicted (GiB) | error", rows),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
