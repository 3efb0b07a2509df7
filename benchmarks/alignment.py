"""Tokens that carry no information, and effective throughput, by alignment (MuxTune's figures 13 and 20).

python benchmarks/alignment.py                       # the quickstart's tasks, and MuxTune's workloads A and B
python benchmarks/alignment.py --output result.json  # the JSON, and the tables as result.md

Lengths are raw: what the tokenizer makes of the quickstart's texts, cut at each data set's limit. Film reviews at 64
stand for SST2, dialogue at 128 for OpenBookQA, prose at 256 for RTE. Shares are of 50 steps; throughput is of one step
of typical lengths, alignments in turns. Effective throughput counts tokens that carry information, per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from script import add_machine, add_output, command_line, measured_on, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

# Data set and limit of each name in table 2, and its workloads: data sets in order, and batch sizes.
DATA = {"SST2": ("movie.jsonl", 64), "QA": ("dialogue.jsonl", 128), "RTE": ("austen.jsonl", 256)}
BATCHES = (4, 2, 4, 4, 8, 2, 4, 4)
WORKLOADS = {
    "A": ("SST2", "QA", "QA", "SST2", "SST2", "SST2", "QA", "QA"),
    "B": ("RTE", "SST2", "RTE", "SST2", "SST2", "RTE", "RTE", "RTE"),
}
SHARED_STEPS = 50
CHUNKS = (None, 64, 128, 256)
MICRO_BATCHES = 4
"""Of every alignment: zero-padded, a whole step would need 20 GB."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add_machine(parser, device=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shares-only", action="store_true", help="count tokens, measure nothing")
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Count, measure, print, leave the JSON."""
    arguments = parse(argv)
    import torch
    from stand import QUICKSTART, profile_of, surroundings

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.runtime import initialize

    torch.set_num_threads(arguments.threads)
    parallel = initialize(device="cpu")
    backbone = Backbone.load(QUICKSTART / "backbone", parallel)
    workloads = {"quickstart": _quickstart(), **{name: _workload(name) for name in WORKLOADS}}
    result: dict[str, Any] = {**surroundings(backbone, arguments.threads), "rounds": arguments.rounds}
    data = {name: _open(specs, QUICKSTART / "backbone") for name, specs in workloads.items()}
    result["shares"] = {name: _shares(specs, data[name]) for name, specs in workloads.items()}
    result["throughput"] = {}
    if not arguments.shares_only:
        profile = profile_of(backbone)
        for name, specs in workloads.items():
            found = _throughput(backbone, parallel, profile, specs, data[name], arguments.rounds)
            result["throughput"][name] = found
            print(json.dumps({name: found}), file=sys.stderr, flush=True)
    publish(result, markdown(result), arguments.output)
    return 0


def _quickstart() -> list[Any]:
    from megatron_mux.tasks import load_task_file

    return load_task_file(Path(__file__).resolve().parents[1] / "examples/quickstart/tasks.yaml")


def _workload(name: str) -> list[Any]:
    from stand import QUICKSTART

    from megatron_mux.tasks import TaskSpec

    lora = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    specs = []
    for i, (kind, batch) in enumerate(zip(WORKLOADS[name], BATCHES, strict=True)):
        file, limit = DATA[kind]
        section = {
            "name": f"{kind}-{i + 1}",
            "adapter": lora,
            "data": {"path": str(QUICKSTART / "data" / file), "max_length": limit},
            "training": {"per_device_train_batch_size": batch, "max_steps": 100_000, "seed": i},
        }
        specs.append(TaskSpec.model_validate(section))
    return specs


def _open(specs: Sequence[Any], backbone: Path) -> list[Any]:
    from megatron_mux.data.dataset import TaskDataset
    from megatron_mux.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(backbone)
    return [TaskDataset(spec.data.path, tokenizer, spec.data.max_length) for spec in specs]


def _shares(specs: Sequence[Any], data: Sequence[Any]) -> dict[str, float]:
    """Of all computed tokens, those that carry no information, over the first steps."""
    from megatron_mux.data.sampler import Sampler
    from megatron_mux.fusion.alignment import Padding, padded_lengths, padding_of
    from megatron_mux.fusion.plan import plan_for
    from megatron_mux.fusion.step import Lengths, step_grid

    dense, padded, longest = Padding(), Padding(), Padding()
    plan = plan_for("spatial", {spec.name: 1 for spec in specs}, 1, chunk=64)
    computed = 0
    limits = {spec.name: spec.data.max_length for spec in specs}
    samplers = [
        Sampler(len(d), s.sequences_per_step, s.training.seed, s.data.shuffle)
        for s, d in zip(specs, data, strict=True)
    ]
    for step in range(SHARED_STEPS):
        lengths = {
            s.name: [int(d.lengths[i]) for i in sampler.batch(step)]
            for s, d, sampler in zip(specs, data, samplers, strict=True)
        }
        dense += padding_of(lengths, {})
        grid = step_grid(plan, {name: Lengths(tuple(own), (0,) * len(own)) for name, own in lengths.items()})
        computed += sum(
            piece.tokens for chunks in grid.chunks.values() for chunk in chunks for piece in chunk
        )
        padded += padding_of(lengths, padded_lengths("max-length", limits))
        longest += padding_of(lengths, padded_lengths("longest", limits))
    return {
        "dense": 1 - dense.real / computed,  # counted in the chunks themselves
        "within_tasks": dense.share_within_tasks,
        "zero_padded": dense.share_zero_padded,
        "max_length": padded.share,
        "longest": longest.share,
    }


def _throughput(
    backbone: Any, parallel: Any, profile: Any, specs: Sequence[Any], data: Sequence[Any], rounds: int
) -> dict[str, Any]:
    """Tokens a second of all tasks in one hybrid task, by alignment."""
    from stand import stand
    from workload import Pair

    from megatron_mux.engine.batches import tensors
    from megatron_mux.fusion.load import typical
    from megatron_mux.fusion.planning_context import PlanningContext
    from tests.reference.records import Records

    records = []
    for spec, own in zip(specs, data, strict=True):
        chosen = typical(own.lengths, spec.sequences_per_step)
        pairs: list[Pair] = [tensors(own[i]) for i in chosen]
        records.append(Records(pairs))
    context = PlanningContext(profile, backbone.info, itemsize=backbone.dtype.itemsize)
    bench = stand(backbone, parallel, context, specs, records)
    try:
        plan = bench.planner.fixed("spatial", bench.loads)
        (bucket,) = plan.buckets
        plans = {
            f"chunk {chunk or 'none'}": replace(
                plan, buckets=(replace(bucket, micro_batches=MICRO_BATCHES, chunk=chunk),)
            )
            for chunk in CHUNKS
        }
        plans["max-length"] = replace(plans["chunk none"], alignment="max-length")
        plans["zero-padded"] = replace(plans["chunk none"], alignment="longest")
        taken: dict[str, list[float]] = {name: [] for name in plans}
        names = list(plans)
        bench.seconds([plans[names[0]]])  # warm up
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                taken[name].append(bench.seconds([plans[name]]))
    finally:
        bench.close()
    real = sum(load.total for load in bench.loads.values())
    limits = {spec.name: spec.data.max_length for spec in specs}
    computed = {
        "max-length": sum(len(r) * limits[s.name] for s, r in zip(specs, records, strict=True)),
        "zero-padded": sum(map(len, records)) * max(limits.values()),
    }
    found = {}
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        tokens = computed.get(name, real)
        found[name] = {"seconds": middle, "tokens_per_s": tokens / middle, "effective_per_s": real / middle}
    return found


def markdown(result: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        measured_on(result["backbone"], result["dtype"], result["hardware"], result["versions"]),
        "",
        f"Share of computed tokens that carry no information, over {SHARED_STEPS} steps:",
        "",
        *table(
            "workload | dense (ours) | padded within tasks | to the longest | to max_length | to the greatest",
            (
                (name, *(f"{share:.1%}" for share in shares.values()))
                for name, shares in result["shares"].items()
            ),
        ),
    ]
    if result["throughput"]:
        lines += [
            "",
            f"One step of typical lengths, in one hybrid task, medians of {result['rounds']} rounds in turns:",
            "",
            *table(
                "workload | alignment | seconds | tokens/s | effective tokens/s | against zero-padded",
                (
                    (
                        name,
                        alignment,
                        f"{one['seconds']:.2f}",
                        f"{one['tokens_per_s']:.0f}",
                        f"{one['effective_per_s']:.0f}",
                        f"{one['effective_per_s'] / found['zero-padded']['effective_per_s']:.2f}x",
                    )
                    for name, found in result["throughput"].items()
                    for alignment, one in found.items()
                ),
            ),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
