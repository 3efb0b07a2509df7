"""The measurements of `vs_peft.py`: speed of all sides, and memory of each case in a process of its own."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mux_side
import peft_side
import process_memory
from script import environment, median_ratio
from vs_peft_sides import Setup, SideResult, in_new_process, measure_sides
from workload import TaskShape, mix_of, padding_share

from megatron_mux import runtime

MEMORY_STEPS = 3


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Describe the machine, the settings and the tasks, for the result file."""
    packages = ("transformers", "peft", "megatron-core")
    return {
        **environment(arguments.backbone.name, arguments.dtype, arguments.threads, packages=packages),
        "records": "made up" if arguments.data is None else "of --data",
        "targets": arguments.targets,
        "repeats": arguments.repeats,
        "steps_in_a_turn": arguments.steps,
        "mix": [asdict(task) for task in mix_of(arguments.backbone_shape)],
    }


def measure_speed(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the speed of all sides on the whole mix, and on its short tasks alone.

    Args:
        arguments: The script's flags.
        scratch: Directory for the initial adapters, which all sides share.
    """
    setup = Setup(arguments, arguments.warm_up + arguments.repeats * arguments.steps)
    parts = {"all": list(range(len(setup.mix))), "short": [0, 1]}
    return {
        part: _summary(setup, members, measure_sides(arguments, setup.steps, members, scratch))
        for part, members in parts.items()
    }


def _summary(setup: Setup, members: Sequence[int], turns: Mapping[str, SideResult]) -> dict[str, Any]:
    size, start = setup.arguments.steps, setup.arguments.warm_up
    examples = [setup.examples(i) for i in members]
    of_step = [sum(len(ids) for task in examples for ids, _ in task[step]) for step in range(setup.steps)]
    tokens = [sum(of_step[first : first + size]) for first in range(start, setup.steps, size)]
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
        "step_over_ceiling": median_ratio(seconds["mux"], seconds["ceiling"]),
        "rivals": {name: _against(turns[name], turns) for name in setup.arguments.rivals},
        "padding_share": padding_share([step for task in examples for step in task]),
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
        "speedup": median_ratio(rival.seconds, mux.seconds),
        "ceiling_speedup": median_ratio(rival.seconds, ceiling.seconds),
        "largest_relative_loss_difference": max(
            abs(ours - theirs) / abs(theirs)
            for row, other in zip(mux.losses, rival.losses, strict=True)
            for ours, theirs in zip(row, other, strict=True)
        ),
    }


def measure_memory(arguments: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Measure each case in a process of its own; for PEFT, one task per shape of batch."""
    cases = ["mux:mix", "mux:one", "mux:eight"]
    found = {case: in_new_process(_memory_of, arguments, case) for case in cases}
    for rival in arguments.rivals:
        for i, count in _tasks_per_batch_shape(mix_of(arguments.backbone_shape)).items():
            one = in_new_process(_memory_of, arguments, f"{rival}:{i}")
            found[f"{rival}:{i}"] = {**one, "tasks_of_this_kind": count}
    return found


def _tasks_per_batch_shape(mix: Sequence[TaskShape]) -> dict[int, int]:
    """Count the tasks of each batch shape (sequences, `max_length`), by the index of the first such task."""
    kinds = [(task.batch, task.max_length) for task in mix]
    return {kinds.index(kind): kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _memory_of(arguments: argparse.Namespace, case: str) -> dict[str, int]:
    """Measure the memory of `mux:mix`, `mux:one`, `mux:eight` or `<rival>:<index of a task>` in this process."""
    setup = Setup(arguments, MEMORY_STEPS)
    side, what = case.split(":")
    before = process_memory.resident_bytes()
    process_memory.reset_peak()
    if side in peft_side.RIVALS:
        model = peft_side.load(arguments.backbone, setup.dtype)
        task, examples = setup.peft_task(model, int(what), side), setup.examples(int(what))
        steps = [lambda pairs=pairs: task.step(pairs) for pairs in examples]
    else:
        # A single task is the largest one of the mix.
        size = len(setup.mix)
        chosen = {"mix": range(size), "one": [size - 1], "eight": [i % size for i in range(8)]}[what]
        parallel = setup.parallel()
        specs = [
            setup.specs[i].model_copy(update={"name": f"{setup.mix[i].name}.{k}"})
            for k, i in enumerate(chosen)
        ]
        records = [setup.records[i] for i in chosen]
        engine = mux_side.make_engine(setup.backbone(parallel), parallel, specs, records, [None] * len(specs))
        steps = [engine.step] * MEMORY_STEPS
    loaded = process_memory.peak_resident_bytes()
    process_memory.reset_peak()
    for step in steps:
        step()
    runtime.shutdown()
    return {"before_loading": before, "peak_while_loading": loaded, **process_memory.report()}
