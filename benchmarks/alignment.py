"""Share of padding, and effective throughput, by alignment (MuxTune's figures 13 and 20).

python benchmarks/alignment.py                       # the quickstart's tasks, and MuxTune's workloads A and B
python benchmarks/alignment.py --output result.json  # the JSON, and the tables as result.md

Lengths are those of the quickstart's texts as tokenised, truncated to each data set's limit. Film reviews of at most 64
tokens replace SST2, dialogue of at most 128 replaces OpenBookQA, prose of at most 256 replaces RTE. Shares of padding
are over 50 steps. Throughput is that of one step of typical lengths; alignments take turns. Effective throughput counts
the tokens per second that are not padding.
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

# File and `max_length` for each data set of MuxTune's table 2, and the batch sizes and data sets of its workloads.
DATA = {"SST2": ("movie.jsonl", 64), "QA": ("dialogue.jsonl", 128), "RTE": ("austen.jsonl", 256)}
BATCHES = (4, 2, 4, 4, 8, 2, 4, 4)
WORKLOADS = {
    "A": ("SST2", "QA", "QA", "SST2", "SST2", "SST2", "QA", "QA"),
    "B": ("RTE", "SST2", "RTE", "SST2", "SST2", "RTE", "RTE", "RTE"),
}
COUNTED_STEPS = 50
CHUNKS = (None, 64, 128, 256)
MICRO_BATCHES = 4
"""Micro-batches of a step, for every alignment: zero-padded, an undivided step would need 20 GB."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add_machine(parser, device=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--shares-only", action="store_true", help="count tokens, but do not measure throughput"
    )
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Count tokens, measure throughput, and publish both."""
    arguments = parse(argv)
    import torch
    from engine_bench import QUICKSTART, environment, load_or_measure_profile

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.runtime import initialize

    torch.set_num_threads(arguments.threads)
    parallel = initialize(device="cpu")
    backbone = Backbone.load(QUICKSTART / "backbone", parallel)
    workloads = {"quickstart": _quickstart(), **{name: _workload(name) for name in WORKLOADS}}
    result: dict[str, Any] = {**environment(backbone, arguments.threads), "rounds": arguments.rounds}
    data = {name: _open_data(specs, QUICKSTART / "backbone") for name, specs in workloads.items()}
    result["shares"] = {name: _shares(specs, data[name]) for name, specs in workloads.items()}
    result["throughput"] = {}
    if not arguments.shares_only:
        profile = load_or_measure_profile(backbone)
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
    from engine_bench import QUICKSTART

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


def _open_data(specs: Sequence[Any], backbone: Path) -> list[Any]:
    from megatron_mux.data.dataset import TaskDataset
    from megatron_mux.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(backbone)
    return [TaskDataset(spec.data.sources, tokenizer, spec.data.max_length) for spec in specs]


def _shares(specs: Sequence[Any], data: Sequence[Any]) -> dict[str, float]:
    """Share of padding among all computed tokens, over the first steps, by alignment."""
    from megatron_mux.data.sampler import Sampler
    from megatron_mux.fusion.alignment import padded_lengths, padding_shares
    from megatron_mux.fusion.plan import plan_for
    from megatron_mux.fusion.step import Lengths, step_chunks

    dense, padded, longest = (list[tuple[int, dict[str, float]]]() for _ in range(3))
    plan = plan_for("spatial", {spec.name: 1 for spec in specs}, 1, chunk=64)
    computed = 0
    limits = {spec.name: spec.data.max_length for spec in specs}
    samplers = [
        Sampler(len(d), s.sequences_per_step, s.training.seed, s.data.shuffle)
        for s, d in zip(specs, data, strict=True)
    ]
    for step in range(COUNTED_STEPS):
        lengths = {
            s.name: [int(d.lengths[i]) for i in sampler.batch(step)]
            for s, d, sampler in zip(specs, data, samplers, strict=True)
        }
        real = sum(map(sum, lengths.values()))
        dense.append((real, padding_shares(lengths, {})))
        chunked = step_chunks(
            plan, {name: Lengths(tuple(own), (0,) * len(own)) for name, own in lengths.items()}
        )
        computed += sum(
            piece.tokens for chunks in chunked.chunks.values() for chunk in chunks for piece in chunk
        )
        padded.append((real, padding_shares(lengths, padded_lengths("max-length", limits))))
        longest.append((real, padding_shares(lengths, padded_lengths("longest", limits))))
    total = sum(real for real, _ in dense)

    def over_all(steps: Sequence[tuple[int, dict[str, float]]], name: str) -> float:
        return 1 - total / sum(real / (1 - shares[name]) for real, shares in steps)

    return {
        "dense": 1 - total / computed,  # counted in the chunks that a step computes
        "within_tasks": over_all(dense, "within_tasks"),
        "zero_padded": over_all(dense, "zero_padded"),
        "max_length": over_all(padded, "plan"),
        "longest": over_all(longest, "plan"),
    }


def _throughput(
    backbone: Any, parallel: Any, profile: Any, specs: Sequence[Any], data: Sequence[Any], rounds: int
) -> dict[str, Any]:
    """Measure tokens per second of all tasks in one hybrid task, by alignment."""
    import torch
    from engine_bench import make_bench
    from workload import Pair

    from megatron_mux.fusion.planner.load import typical
    from megatron_mux.fusion.planner.planning_context import PlanningContext
    from tests.reference.records import Records

    records = []
    for spec, own in zip(specs, data, strict=True):
        chosen = typical(own.lengths, spec.sequences_per_step)
        pairs: list[Pair] = [
            (torch.as_tensor(e.tokens), torch.as_tensor(e.labelled)) for e in map(own.__getitem__, chosen)
        ]
        records.append(Records(pairs))
    context = PlanningContext(profile, backbone.info, itemsize=backbone.dtype.itemsize)
    bench = make_bench(backbone, parallel, context, specs, records)
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
    """Render the tables."""
    lines = [
        measured_on(result["backbone"], result["dtype"], result["hardware"], result["versions"]),
        "",
        f"Share of padding among computed tokens, over {COUNTED_STEPS} steps:",
        "",
        *table(
            "workload | dense (ours) | padded within tasks | to the longest of all | to max_length | "
            "to the largest max_length",
            (
                (name, *(f"{share:.1%}" for share in shares.values()))
                for name, shares in result["shares"].items()
            ),
        ),
    ]
    if result["throughput"]:
        lines += [
            "",
            f"One step of typical lengths in one hybrid task, medians of {result['rounds']} rounds in turns:",
            "",
            *table(
                "workload | alignment | seconds | tokens/s | effective tokens/s | over zero-padded",
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
