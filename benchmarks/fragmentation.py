"""Fragmentation of the caching allocator as a share of transient memory: the constant of plans and rankings.

python benchmarks/fragmentation.py                                                  # a few minutes
python benchmarks/fragmentation.py --output benchmarks/results/fragmentation.json   # the JSON, and the table as .md

Steps of our engine come from dry runs, steps of full fine-tuning with `transformers` from traces. Their allocations are
replayed through a model of PyTorch's caching allocator with default options. With unlimited memory the allocator holds
more than it needs, since it returns cached segments only when it runs out: fragmentation is therefore taken in the
smallest memory in which the step runs. Nothing is measured: the result is the same on every machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from megatron_mux.memory.stream.events import Stream

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 768, "n_layer": 4, "n_head": 12}
_PERSISTENT = ("parameters", "adapters", "gradients", "optimizer")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Record steps, replay them, and publish."""
    arguments = parse(argv)
    rows = [_row(*found) for found in (*dry_run_streams(), *traced_streams())]
    shares = sorted(row["share"] for row in rows)
    result = {
        "median": statistics.median(shares),
        "least": shares[0],
        "most": shares[-1],
        "cases": rows,
    }
    publish(result, markdown(result), arguments.output)
    return 0


def dry_run_streams() -> Iterator[tuple[str, Stream]]:
    """Record steps of our engine in dry runs, by name."""
    from megatron_mux.dry_run.process import dry_runs
    from megatron_mux.memory.forms.method import ParallelConfig
    from tests.end_to_end.test_method_tables import setting_of

    methods = {
        "one GPU": ParallelConfig(),
        "recomputed": ParallelConfig(recompute="full"),
        "two tensor ranks": ParallelConfig(tensor=2, sequence_parallel=True),
        "two stages": ParallelConfig(pipeline=2, parts=8),
        "sharded": ParallelConfig(data=2, zero=3),
    }
    run_specs = {
        f"{'+'.join(names)}, {sequences} x {length}, {name}": setting_of(
            names, method, length, sequences, LLAMA
        )
        for names in (("lora",), ("bottle", "dropped", "scales"))
        for length, sequences in ((512, 8), (1536, 8))
        for name, method in methods.items()
    }
    found = dry_runs([(run_spec, 0) for run_spec in run_specs.values()], whole=True)
    for name, recording in zip(run_specs, found, strict=True):
        yield name, recording.stream


def traced_streams() -> Iterator[tuple[str, Stream]]:
    """Trace full fine-tuning with `transformers` in bf16 on one GPU, by name."""
    from megatron_mux.memory.trace.case import Case
    from megatron_mux.memory.trace.training import trace

    for config in (LLAMA, GPT2):
        for batch, length in ((2, 512), (4, 1024)):
            for recompute in (False, True):
                suffix = ", recomputed" if recompute else ""
                name = f"full {config['model_type']}, {batch} x {length}{suffix}"
                yield name, trace(Case(config, 4, batch, length, recompute=recompute))


def _row(name: str, stream: Stream) -> dict[str, Any]:
    from megatron_mux.memory.caching.replay import replay
    from megatron_mux.memory.caching.settings import Settings
    from tests.unit.memory.stream.peak import peak_of

    peak = peak_of(stream)
    transient = sum(size for category, size in peak.breakdown.items() if str(category) not in _PERSISTENT)
    unlimited = replay(stream, Settings()).peak_reserved
    smallest = _smallest_memory(stream, peak.size, unlimited)
    return {
        "name": name,
        "peak_bytes": peak.size,
        "transient_bytes": transient,
        "smallest_bytes": smallest,
        "unlimited_bytes": unlimited,
        "share": (smallest - peak.size) / transient,
        "unlimited_share": (unlimited - peak.size) / transient,
    }


def _smallest_memory(stream: Stream, low: int, high: int) -> int:
    """Find the smallest memory in which the step runs, between `low` and `high` bytes, to within 1 MiB."""
    from megatron_mux.memory.caching.replay import replay
    from megatron_mux.memory.caching.settings import Settings

    while high - low > 1 << 20:
        middle = (low + high) // 2
        if replay(stream, Settings(capacity=middle)).out_of_memory is None:
            high = middle
        else:
            low = middle
    return high


def markdown(result: Mapping[str, Any]) -> str:
    """Render the table."""
    mib = 1 << 20
    rows = [
        [
            row["name"],
            f"{row['peak_bytes'] / mib:,.0f}",
            f"{row['transient_bytes'] / mib:,.0f}",
            f"{row['smallest_bytes'] / mib:,.0f}",
            f"{row['share']:.1%}",
            f"{row['unlimited_bytes'] / mib:,.0f}",
            f"{row['unlimited_share']:.1%}",
        ]
        for row in result["cases"]
    ]
    head = (
        "step | peak (MiB) | transient (MiB) | smallest memory (MiB) | fragmentation | without a limit (MiB) | "
        "fragmentation"
    )
    summary = (
        f"Fragmentation in the smallest memory: median {result['median']:.1%}, from {result['least']:.1%} to "
        f"{result['most']:.1%}"
    )
    return "\n".join([*table(head, rows), "", summary])


if __name__ == "__main__":
    sys.exit(main())
