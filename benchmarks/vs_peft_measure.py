"""The measurements of `vs_peft.py`: speed of all sides, memory of one case, and the machine they ran on."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mux_side
import peft_side
import process_memory
import torch
from vs_peft_setup import Setup
from vs_peft_sides import SideResult, measure_sides
from workload import mix_of, mix_to_json, padding_share

from megatron_mux import runtime

MEMORY_STEPS = 3
PACKAGES = ("torch", "transformers", "peft", "megatron-core")


def measure_speed(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the speed of all sides on the whole mix, and on its short tasks alone.

    Args:
        arguments: The script's flags.
        scratch: Directory for the initial adapters, which all sides share.
    """
    turns_in_all = arguments.repeats + arguments.profile
    setup = Setup(arguments, arguments.warm_up + turns_in_all * arguments.steps)
    everything = list(range(len(setup.mix)))
    short = [i for i in everything if setup.mix[i].short] or everything[:2]
    if arguments.backbone_shape == "tiny":
        short = everything[:2]
    found: dict[str, Any] = {}
    for part, members in (("all", everything), ("short", short)):
        profiled = arguments.profile and part == "all"
        turns = measure_sides(arguments, setup.steps, members, scratch, profiled)
        found[part] = _summary(setup, members, turns)
        if profiled:
            found["profile"] = {name: side.profile for name, side in turns.items()}
    return found


def _summary(setup: Setup, members: Sequence[int], turns: Mapping[str, SideResult]) -> dict[str, Any]:
    size, start = setup.arguments.steps, setup.arguments.warm_up
    examples = [setup.examples(i) for i in members]
    timed = start + setup.arguments.repeats * size
    of_step = [sum(len(ids) for task in examples for ids, _ in task[step]) for step in range(timed)]
    tokens = [sum(of_step[first : first + size]) for first in range(start, timed, size)]
    seconds = {name: side.seconds for name, side in turns.items()}
    rates = {
        name: statistics.median(count / s for count, s in zip(tokens, times, strict=True))
        for name, times in seconds.items()
    }
    return {
        "tasks": [setup.mix[i].name for i in members],
        "tokens_of_turns": tokens,
        "seconds_of_turns": seconds,
        "tokens_per_second": rates,
        "step_over_ceiling": _median_ratio(seconds["mux"], seconds["ceiling"]),
        "rivals": {name: _against(turns[name], turns) for name in setup.arguments.rivals},
        "padding_share": padding_share([step for task in examples for step in task[:timed]]),
        "losses": {
            name: {setup.mix[i].name: [row[k] for row in side.losses] for k, i in enumerate(members)}
            for name, side in turns.items()
            if name != "ceiling"
        },
    }


def _against(rival: SideResult, turns: Mapping[str, SideResult]) -> dict[str, Any]:
    """Our sides' speed over a rival's, and how far the losses are apart."""
    mux, ceiling = turns["mux"], turns["ceiling"]
    return {
        "speedup": _median_ratio(rival.seconds, mux.seconds),
        "speedup_of_turns": [p / m for p, m in zip(rival.seconds, mux.seconds, strict=True)],
        "ceiling_speedup": _median_ratio(rival.seconds, ceiling.seconds),
        "largest_relative_loss_difference": max(
            abs(ours - theirs) / abs(theirs)
            for row, other in zip(mux.losses, rival.losses, strict=True)
            for ours, theirs in zip(row, other, strict=True)
        ),
    }


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over turns; both sides of a turn trained on the same records under the same load of the machine."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def measure_memory(arguments: argparse.Namespace, part: str) -> dict[str, int]:
    """Measure the memory of one case here.

    Args:
        arguments: The script's flags.
        part: `mux:mix`, `mux:one`, `mux:eight`, `mux:<number of tasks>` or `<rival>:<index of a task>`.
    """
    setup = Setup(arguments, MEMORY_STEPS)
    side, what = part.split(":")
    before = process_memory.resident_bytes()
    process_memory.reset_peak(setup.device)
    if side in peft_side.RIVALS:
        model = peft_side.load(arguments.backbone, setup.dtype, setup.device, side)
        task = setup.peft_task(model, int(what), side)
        examples = setup.examples(int(what))
        loaded = process_memory.peak_resident_bytes()
        process_memory.reset_peak(setup.device)
        for pairs in examples:
            task.step(pairs)
        return {**_around_loading(setup, before, loaded), **process_memory.report(setup.device)}
    parallel = setup.parallel()
    named = {"mix": len(setup.mix), "one": 1, "eight": 8}
    count = named[what] if what in named else int(what)
    chosen = [i % len(setup.mix) for i in range(count)]
    # A single task is the largest one of the mix.
    chosen = [len(setup.mix) - 1] if what == "one" else chosen
    specs = [
        setup.specs[i].model_copy(update={"name": f"{setup.mix[i].name}.{k}"}) for k, i in enumerate(chosen)
    ]
    engine = mux_side.make_engine(
        setup.backbone(parallel), parallel, specs, [setup.records[i] for i in chosen], [None] * count
    )
    loaded = process_memory.peak_resident_bytes()
    process_memory.reset_peak(setup.device)
    for _ in range(MEMORY_STEPS):
        engine.step()
    runtime.shutdown()
    return {**_around_loading(setup, before, loaded), **process_memory.report(setup.device)}


def _around_loading(setup: Setup, before: int, loaded: int) -> dict[str, int]:
    """Host memory around loading; on a GPU reported apart, since the measurement is of the device's memory there."""
    if setup.device.type == "cuda":
        return {"host_peak_while_loading": loaded}
    return {"before_loading": before, "peak_while_loading": loaded}


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Describe hardware, versions, settings and tasks, for the result file."""
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    return {
        "hardware": {
            "cpu": cpu_name(),
            "threads": arguments.threads,
            "gpu": gpu,
            "memory_bytes": _memory_bytes(),
        },
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "settings": {
            "device": arguments.device,
            "dtype": arguments.dtype,
            "backbone": backbone_name(arguments),
            "records": "made up" if arguments.data is None else "of --data",
            "lora": {"targets": arguments.targets},
            "repeats": arguments.repeats,
            "steps_in_a_turn": arguments.steps,
            "liger": peft_side.uses_liger(torch.device(arguments.device)),
        },
        "mix": mix_to_json(mix_of(arguments.backbone_shape, arguments.device, arguments.sequences)),
    }


def backbone_name(arguments: argparse.Namespace) -> str:
    """Name the backbone; of a random one the shape, and the number of layers if it is another."""
    shape = arguments.backbone_shape
    if shape is None:
        return str(arguments.backbone.name)
    return f"{shape} with {arguments.layers} layers" if arguments.layers else str(shape)


def cpu_name() -> str:
    """Name of this machine's CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    line = Path("/proc/meminfo").read_text().splitlines()[0]
    return int(line.split()[1]) * 1024
