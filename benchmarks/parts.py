"""What is measured: speeds from the turns of all sides, memory of one case, and what they were measured on."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memory
import mux_side
import peft_side
import torch
from bench import Bench
from turns import take_turns
from workload import RANK, Pair, as_plain, padding_share

MEMORY_STEPS = 3
PACKAGES = ("torch", "transformers", "peft", "megatron-core")


def speed(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Take turns; for the whole mix, and for its short tasks alone.

    Args:
        arguments: The script's flags.
        scratch: A directory to pass tensors through.
    """
    bench = Bench(arguments, arguments.warm_up + arguments.repeats * arguments.steps)
    everything = list(range(len(bench.mix)))
    short = [i for i in everything if bench.mix[i].short] or everything[:2]
    if arguments.backbone_shape == "tiny":
        short = everything[:2]
    found: dict[str, Any] = {"mix": as_plain(bench.mix)}
    for part, members in (("all", everything), ("short", short)):
        turns = take_turns(arguments, bench.steps, members, scratch)
        seconds = {name: side.seconds for name, side in turns.items()}
        losses = {name: turns[name].losses for name in ("mux", "peft")}
        found[part] = _summary(bench, members, [bench.examples(i) for i in members], seconds, losses)
    return found


def _summary(
    bench: Bench,
    members: Sequence[int],
    examples: Sequence[Sequence[Sequence[Pair]]],
    seconds: dict[str, list[float]],
    losses: dict[str, list[list[float]]],
) -> dict[str, Any]:
    size, start = bench.arguments.steps, bench.arguments.warm_up
    of_step = [sum(len(ids) for task in examples for ids, _ in task[step]) for step in range(bench.steps)]
    tokens = [sum(of_step[start + t * size : start + (t + 1) * size]) for t in range(bench.arguments.repeats)]
    rates = {
        name: statistics.median(count / s for count, s in zip(tokens, times, strict=True))
        for name, times in seconds.items()
    }
    apart = max(
        abs(ours - theirs) / abs(theirs)
        for row, other in zip(losses["mux"], losses["peft"], strict=True)
        for ours, theirs in zip(row, other, strict=True)
    )
    return {
        "tasks": [bench.mix[i].name for i in members],
        "tokens_of_turns": tokens,
        "seconds_of_turns": seconds,
        "tokens_per_second": rates,
        "speedup": _median_ratio(seconds["peft"], seconds["mux"]),
        "speedup_of_turns": [p / m for p, m in zip(seconds["peft"], seconds["mux"], strict=True)],
        "ceiling_speedup": _median_ratio(seconds["peft"], seconds["ceiling"]),
        "step_over_ceiling": _median_ratio(seconds["mux"], seconds["ceiling"]),
        "padding_share_of_peft": padding_share([step for task in examples for step in task]),
        "losses": {
            name: {bench.mix[i].name: [row[k] for row in rows] for k, i in enumerate(members)}
            for name, rows in losses.items()
        },
        "largest_relative_loss_difference": apart,
    }


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over turns: both sides of a turn saw the same records and the same machine."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def memory_of(arguments: argparse.Namespace, part: str) -> dict[str, int]:
    """Memory of one case in this process: `mux:mix`, `mux:one`, `mux:eight`, or `peft:<index>` (that task alone)."""
    bench = Bench(arguments, MEMORY_STEPS)
    side, what = part.split(":")
    before = memory.resident_bytes()
    memory.reset_peak(bench.device)
    if side == "peft":
        task = bench.peft_task(peft_side.load(arguments.backbone, bench.dtype, bench.device), int(what))
        examples = bench.examples(int(what))
        loaded = memory.peak_resident_bytes()
        memory.reset_peak(bench.device)
        for pairs in examples:
            task.step(pairs)
        return {**_around_loading(bench, before, loaded), **memory.report(bench.device)}
    parallel = bench.parallel()
    count = {"mix": len(bench.mix), "one": 1, "eight": 8}[what]
    chosen = [i % len(bench.mix) for i in range(count)]
    # The largest task stands for "one": nothing is gained by comparing with the smallest.
    chosen = [len(bench.mix) - 1] if what == "one" else chosen
    specs = [
        bench.specs[i].model_copy(update={"name": f"{bench.mix[i].name}.{k}"}) for k, i in enumerate(chosen)
    ]
    engine = mux_side.make_engine(
        bench.backbone(parallel), parallel, specs, [bench.records[i] for i in chosen], [None] * count
    )
    loaded = memory.peak_resident_bytes()
    memory.reset_peak(bench.device)
    for _ in range(MEMORY_STEPS):
        engine.step()
    return {**_around_loading(bench, before, loaded), **memory.report(bench.device)}


def _around_loading(bench: Bench, before: int, loaded: int) -> dict[str, int]:
    """What the host held; on a GPU the measurement is of the device's memory, and this says nothing of it."""
    if bench.device.type == "cuda":
        return {"host_peak_while_loading": loaded}
    return {"before_loading": before, "peak_while_loading": loaded}


def surroundings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Hardware, versions and settings."""
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    return {
        "hardware": {
            "cpu": _cpu_name(),
            "threads": arguments.threads,
            "gpu": gpu,
            "memory_bytes": _memory_bytes(),
        },
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "settings": {
            "device": arguments.device,
            "dtype": "bfloat16" if arguments.device == "cuda" else "float32",
            "backbone": arguments.backbone_shape or arguments.backbone.name,
            "records": "made up" if arguments.data is None else "of --data",
            "lora": {"r": RANK, "targets": arguments.targets},
            "repeats": arguments.repeats,
            "steps_in_a_turn": arguments.steps,
        },
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    line = Path("/proc/meminfo").read_text().splitlines()[0]
    return int(line.split()[1]) * 1024
