"""The measurements themselves: speed by turns, memory of one case, and what they were measured on."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import memory
import mux_side
import peft_side
import torch
from torch import Tensor
from workload import LEARNING_RATE, RANK, Pair, TaskShape, as_plain, made_up_records, mix_of, padding_share

from megatron_mux.backbone.model import Backbone
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.tokenise import load_tokenizer
from megatron_mux.runtime import Parallel, initialize

MEMORY_STEPS = 3
PACKAGES = ("torch", "transformers", "peft", "megatron-core")


class Bench:
    """Backbone, records and specs of one measurement.

    Args:
        arguments: The script's flags.
        steps: Steps each task could take: length of its schedule.
    """

    def __init__(self, arguments: argparse.Namespace, steps: int) -> None:
        torch.set_num_threads(arguments.threads)
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
        self.steps = steps
        self.mix = mix_of(arguments.backbone_shape, arguments.device)
        self.specs = [mux_side.spec(shape, arguments.targets, steps, i) for i, shape in enumerate(self.mix)]
        self.records = [self._records(i, shape) for i, shape in enumerate(self.mix)]

    def _records(self, i: int, shape: TaskShape) -> mux_side.Records:
        if self.arguments.data is not None and shape.records:
            tokenizer = load_tokenizer(self.arguments.backbone)
            return TaskDataset(self.arguments.data / shape.records, tokenizer, shape.max_length)
        vocab = _vocabulary(self.arguments.backbone)
        return mux_side.InMemory(made_up_records(shape, shape.batch * self.steps, vocab, seed=i))

    def parallel(self) -> Parallel:
        """This process alone."""
        return initialize(device=self.device)

    def backbone(self, parallel: Parallel) -> Backbone:
        """A backbone of ours."""
        return Backbone.load(self.arguments.backbone, parallel, self.dtype)

    def examples(self, i: int) -> list[list[Pair]]:
        """What task `i` trains on, step by step."""
        return mux_side.examples(self.specs[i], self.records[i], self.steps)

    def peft_task(
        self, model: torch.nn.Module, i: int, initial: dict[str, Tensor] | None = None
    ) -> peft_side.PeftTask:
        """Task `i` for PEFT."""
        return peft_side.PeftTask(model, RANK, self.arguments.targets, LEARNING_RATE, self.steps, initial)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Take turns; for the whole mix, and for its short tasks alone."""
    bench = Bench(arguments, arguments.warm_up + arguments.repeats * arguments.steps)
    parallel = bench.parallel()
    backbone = bench.backbone(parallel)
    ceiling = mux_side.Ceiling(bench.backbone(parallel), bench.device)
    model = peft_side.load(arguments.backbone, bench.dtype, bench.device)
    everything = list(range(len(bench.mix)))
    short = [i for i in everything if bench.mix[i].short] or everything[:2]
    if arguments.backbone_shape == "tiny":
        short = everything[:2]
    return {
        "mix": as_plain(bench.mix),
        "all": _turns(bench, parallel, backbone, ceiling, model, everything),
        "short": _turns(bench, parallel, backbone, ceiling, model, short),
    }


def _turns(
    bench: Bench,
    parallel: Parallel,
    backbone: Backbone,
    ceiling: mux_side.Ceiling,
    model: torch.nn.Module,
    members: Sequence[int],
) -> dict[str, Any]:
    peft_tasks = [bench.peft_task(peft_side.share_weights(model), i) for i in members]
    engine = mux_side.make_engine(
        backbone,
        parallel,
        [bench.specs[i] for i in members],
        [bench.records[i] for i in members],
        [task.tensors() for task in peft_tasks],
    )
    examples = [bench.examples(i) for i in members]
    losses: dict[str, list[list[float]]] = {"mux": [], "peft": []}

    def mux(step: int) -> None:
        results = engine.step()
        losses["mux"].append([results[bench.mix[i].name].loss for i in members])

    def peft(step: int) -> None:
        losses["peft"].append([task.step(examples[k][step]) for k, task in enumerate(peft_tasks)])

    def bare(step: int) -> None:
        ceiling.step([examples[k][step] for k in range(len(members))])

    sides: dict[str, Callable[[int], None]] = {"mux": mux, "peft": peft, "ceiling": bare}
    for step in range(bench.arguments.warm_up):
        for side in sides.values():
            side(step)
    seconds = _alternate(bench, sides)
    for i in members:
        engine.remove_task(bench.mix[i].name)
    return _summary(bench, members, examples, seconds, losses)


def _alternate(bench: Bench, sides: dict[str, Callable[[int], None]]) -> dict[str, list[float]]:
    """Seconds of every turn; who goes first changes from turn to turn."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    step = bench.arguments.warm_up
    for turn in range(bench.arguments.repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            bench.synchronize()
            start = time.perf_counter()
            for k in range(bench.arguments.steps):
                sides[name](step + k)
            bench.synchronize()
            seconds[name].append(time.perf_counter() - start)
        step += bench.arguments.steps
    return seconds


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


def _vocabulary(backbone: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(backbone, local_files_only=True).vocab_size)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    line = Path("/proc/meminfo").read_text().splitlines()[0]
    return int(line.split()[1]) * 1024
