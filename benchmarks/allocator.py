"""Speed of replaying a step's allocations, and of extending them from steps of two and three layers.

python benchmarks/allocator.py                   # 80 layers, two numbers of events: a quarter of a minute
python benchmarks/allocator.py --output benchmarks/results/allocator.json  # the JSON, and the table as allocator.md

The steps are synthetic: each layer saves a part of what it allocates in the forward pass, allocates again in the
backward pass, and once more in the optimizer step. Sizes are those of a 70B model (hidden 8192, 4096 tokens).
Goal: 500,000 events replayed in less than 2 seconds.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.fusion.device import cpu_name
from megatron_mux.memory.caching.replay import replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.stream.events import Category, Moment, Stream, StreamBuilder
from megatron_mux.memory.stream.extension import extended

GOAL = 250_000
"""Events per second: 500,000 in 2 seconds."""
SIZES = (512, 16_384, 65_536, 2 * MIB, 16 * MIB, 64 * MIB, 224 * MIB)
WEIGHTS = (6, 6, 3, 3, 3, 6, 1)
T = TypeVar("T")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--events", type=int, nargs="+", default=[200_000, 500_000])
    parser.add_argument("--repeats", type=int, default=3)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    arguments = parse(argv)
    result = {
        "cpu": f"{cpu_name()}, one of {os.cpu_count()} cores",
        "python": platform.python_version(),
        "layers": arguments.layers,
        "repeats": arguments.repeats,
        "cases": [measure(events, arguments.layers, arguments.repeats) for events in arguments.events],
    }
    publish(result, markdown(result), arguments.output)
    return 0


def make_step(layers: int, events: int) -> Stream:
    """Make a synthetic step with about `events` events in each of its layers."""
    builder = StreamBuilder()
    builder.allocate(256 * MIB, Moment("forward", None, "embedding"))
    saved = [layer_pass(builder, "forward", layer, events, keep=True) for layer in range(layers)]
    builder.allocate(1024 * MIB, Moment("loss", None, "logits"), category=Category.LOGITS)
    for layer in reversed(range(layers)):
        layer_pass(builder, "backward", layer, events, keep=False)
        for block in saved[layer]:
            builder.free(block, Moment("backward", layer, "free"))
    for layer in range(layers):
        layer_pass(builder, "optimizer", layer, events // 2, keep=False)
    return builder.done()


def layer_pass(builder: StreamBuilder, phase: str, layer: int, events: int, keep: bool) -> list[int]:
    """Allocate and free blocks, alike in every layer; returns the blocks that stay allocated, which `keep` asks for."""
    chance = random.Random(f"{phase} {events}")
    live: list[int] = []
    kept: list[int] = []
    for index in range(events // 5):
        moment = Moment(phase, layer, f"operator {index % 40}")
        block = builder.allocate(chance.choices(SIZES, WEIGHTS)[0], moment)
        (kept if keep and chance.random() < 0.05 else live).append(block)
        if len(live) > 12:
            builder.free(live.pop(chance.randrange(len(live))), moment)
    for block in live:
        builder.free(block, Moment(phase, layer, "free"))
    return kept


def measure(events: int, layers: int, repeats: int) -> dict[str, Any]:
    """Measure extending and replaying for one number of events, in median seconds of CPU time."""
    each = events // layers
    two, three = make_step(2, each), make_step(3, each)
    extending, stream = time_calls(lambda: extended(two, three, layers), repeats)
    found: dict[str, Any] = {"events": len(stream), "extending_s": extending}
    for name, settings in (("default", Settings()), ("expandable", Settings(expandable_segments=True))):
        seconds, replayed = time_calls(lambda chosen=settings: replay(stream, chosen), repeats)  # type: ignore[misc]
        found[name] = {
            "replay_s": seconds,
            "events_per_s": len(stream) / seconds,
            "peak_allocated_bytes": replayed.peak_allocated,
            "peak_reserved_bytes": replayed.peak_reserved,
        }
    return found


def time_calls(work: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Run `work` several times; returns its median CPU time in seconds and its last result."""
    taken = []
    for _ in range(repeats):
        begun = time.process_time()
        result = work()
        taken.append(time.process_time() - begun)
    return statistics.median(taken), result


def markdown(result: Mapping[str, Any]) -> str:
    """Render the table."""
    rows = []
    for case in result["cases"]:
        for name in ("default", "expandable"):
            found = case[name]
            rows.append(
                (
                    f"{case['events']:,}",
                    name,
                    f"{case['extending_s']:.2f} s",
                    f"{found['replay_s']:.2f} s",
                    f"{found['events_per_s']:,.0f} (goal {GOAL:,})",
                    f"{found['peak_allocated_bytes'] / MIB:.0f}",
                    f"{found['peak_reserved_bytes'] / MIB:.0f}",
                )
            )
    headings = (
        "events | segments | extending | replay | events/s | peak allocated (MiB) | peak reserved (MiB)"
    )
    head = f"{result['cpu']}; Python {result['python']}; {result['layers']} layers, medians of {result['repeats']}."
    return "\n".join([head, "", *table(headings, rows)])


if __name__ == "__main__":
    sys.exit(main())
