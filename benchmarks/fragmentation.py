"""What the caching allocator needs beyond tensors, as a share of what comes and goes: the constant of our closed forms.

python benchmarks/fragmentation.py                                                  # a few minutes
python benchmarks/fragmentation.py --output benchmarks/results/fragmentation.json   # the JSON, and the table as .md

Steps of our engine come from dry runs, steps of full fine-tuning with `transformers` from traces;
their allocations are replayed through PyTorch's caching allocator with its default options. With plenty of memory it
holds more than it needs: at the limit it returns cached segments. So the least memory counts in which a step runs.
Nothing is measured: the result is the same on every machine.
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
_STANDS = ("parameters", "adapters", "gradients", "optimizer")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Dry-run and trace, replay, print."""
    arguments = parse(argv)
    rows = [_row(*found) for found in (*dry_run_streams(), *traced())]
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
    """Steps of our engine."""
    from megatron_mux.dry_run.process import dry_runs
    from megatron_mux.memory.forms.method import Method
    from tests.end_to_end.test_memory_forms import setting_of

    methods = {
        "one GPU": Method(),
        "computed again": Method(recompute="full"),
        "two tensor ranks": Method(tensor=2, sequence_parallel=True),
        "two stages": Method(pipeline=2, parts=8),
        "sharded": Method(data=2, zero=3),
    }
    asked = {
        f"{'+'.join(names)}, {sequences} x {length}, {name}": setting_of(
            names, method, length, sequences, LLAMA
        )
        for names in (("lora",), ("bottle", "dropped", "scales"))
        for length, sequences in ((512, 8), (1536, 8))
        for name, method in methods.items()
    }
    found = dry_runs([(run_spec, 0) for run_spec in asked.values()], whole=True)
    for name, recording in zip(asked, found, strict=True):
        yield name, recording.stream


def traced() -> Iterator[tuple[str, Stream]]:
    """Full fine-tuning with `transformers` in bf16, on one GPU."""
    from megatron_mux.memory.trace.case import Case
    from megatron_mux.memory.trace.training import trace

    for config in (LLAMA, GPT2):
        for batch, length in ((2, 512), (4, 1024)):
            for again in (False, True):
                said = ", computed again" if again else ""
                name = f"full {config['model_type']}, {batch} x {length}{said}"
                yield name, trace(Case(config, 4, batch, length, recompute=again))


def _row(name: str, stream: Stream) -> dict[str, Any]:
    from megatron_mux.memory.caching.replay import replay
    from megatron_mux.memory.caching.settings import Settings
    from tests.unit.memory.stream.peak import peak_of

    peak = peak_of(stream)
    moving = sum(size for category, size in peak.breakdown.items() if str(category) not in _STANDS)
    plenty = replay(stream, Settings()).peak_reserved
    least = _least(stream, peak.size, plenty)
    return {
        "name": name,
        "peak_bytes": peak.size,
        "moving_bytes": moving,
        "least_bytes": least,
        "plenty_bytes": plenty,
        "share": (least - peak.size) / moving,
        "share_of_plenty": (plenty - peak.size) / moving,
    }


def _least(stream: Stream, low: int, high: int) -> int:
    """Bytes, to 1 MiB, of the smallest GPU on which the allocator, which returns what is cached, serves the step."""
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
    """The table."""
    mib = 1 << 20
    rows = [
        [
            row["name"],
            f"{row['peak_bytes'] / mib:,.0f}",
            f"{row['moving_bytes'] / mib:,.0f}",
            f"{row['least_bytes'] / mib:,.0f}",
            f"{row['share']:.1%}",
            f"{row['plenty_bytes'] / mib:,.0f}",
            f"{row['share_of_plenty']:.1%}",
        ]
        for row in result["cases"]
    ]
    head = "step | peak, MiB | comes and goes | least GPU | in vain | with plenty | in vain"
    said = f"least GPU: median {result['median']:.1%}, from {result['least']:.1%} to {result['most']:.1%}"
    return "\n".join([*table(head, rows), "", said])


if __name__ == "__main__":
    sys.exit(main())
