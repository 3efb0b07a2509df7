"""Renders the result of `vs_peft.py` as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import operator_profile
from script import measured_on, table

GOALS = {("padded", "all"): 1.35, ("padded", "short"): 1.75}
CEILING_GOAL = 1.12
PERSISTENT_GOAL = 1.15
PEFT_NAMES = {"padded": "PEFT, padded batches", "packed": "PEFT, packed without padding"}
RIVAL_NAMES = {**PEFT_NAMES, "zero-padded": "megatron-mux, padded to the longest of all tasks"}
SIDE_NAMES = {**RIVAL_NAMES, "mux": "megatron-mux", "ceiling": "the frozen backbone alone"}
_SPEED_HEADINGS = (
    "tasks | rival (PEFT: one task at a time) | rival (tokens/s) | megatron-mux (tokens/s) | speed-up | "
    "ceiling: frozen backbone alone | step / ceiling"
)


def markdown(result: Mapping[str, Any]) -> str:
    """Render hardware, speed, memory, losses and profiles."""
    parts = (_head, _speed, _memory, _losses, _profiles)
    return "\n\n".join("\n".join(lines) for part in parts if (lines := part(result)))


def _head(result: Mapping[str, Any]) -> list[str]:
    settings, mix = result["settings"], result["mix"]
    tasks = ", ".join(f"{t['sequences']} x <= {t['max_length']}" for t in mix)
    lora = f"LoRA {ranks_of(mix)} on {', '.join(settings['lora']['targets'])}"
    parts = [lora, f"records {settings['records']}"]
    if "all" in result:
        parts.append(f"{settings['repeats']} turns of {settings['steps_in_a_turn']} steps, medians")
    return [
        measured_on(settings["backbone"], settings["dtype"], where(result), result["versions"]),
        f"Tasks (sequences x tokens a step): {tasks}; {'; '.join(parts)}.",
    ]


def where(result: Mapping[str, Any]) -> str:
    """Name the hardware on which a result was measured."""
    hardware = result["hardware"]
    return str(hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads")


def ranks_of(tasks: Sequence[Mapping[str, Any]]) -> str:
    """The LoRA rank of all tasks, or the rank of each in the tasks' order."""
    ranks = [str(task["rank"]) for task in tasks]
    return f"r={ranks[0]}" if len(set(ranks)) == 1 else f"r={'/'.join(ranks)}"


def _speed(result: Mapping[str, Any]) -> list[str]:
    if "all" not in result:
        return []
    on_cpu = result["hardware"]["gpu"] is None
    rows = []
    for key, name in (("all", "the whole mix"), ("short", "its short tasks")):
        part = result[key]
        rate = part["tokens_per_second"]
        over = f" (goal {CEILING_GOAL:.2f})" if on_cpu and key == "all" else ""
        for rival, found in part["rivals"].items():
            goal = GOALS.get((rival, key)) if on_cpu else None
            row = (
                f"{name} ({len(part['tasks'])})",
                RIVAL_NAMES[rival],
                f"{rate[rival]:.0f}",
                f"{rate['mux']:.0f}",
                f"**{found['speedup']:.2f}x**" + (f" (goal {goal:.2f}x)" if goal else ""),
                f"{found['ceiling_speedup']:.2f}x",
                f"{part['step_over_ceiling']:.3f}{over}",
            )
            rows.append(row)
    padding = " and ".join(f"{result[key]['padding_share']:.0%}" for key in ("all", "short"))
    explained = f"Tokens do not include padding, on any side; padded batches are {padding} padding."
    return [*table(_SPEED_HEADINGS, rows), "", explained]


def _memory(result: Mapping[str, Any]) -> list[str]:
    memory = result["memory"]
    if not memory:
        return []
    rows = []
    for rival, name in PEFT_NAMES.items():
        cases = [found for case, found in memory.items() if case.startswith(f"{rival}:")]
        if cases:
            count = sum(found["tasks_of_this_kind"] for found in cases)
            together = sum(_peak(found) * found["tasks_of_this_kind"] for found in cases)
            largest = max(map(_peak, cases))
            rows.append(
                (f"peak, {name}, the largest of {count} tasks run one after the other", _mib(largest))
            )
            rows.append((f"peak, {name}, {count} tasks at once, one process each", _mib(together)))
    one, eight = memory["mux:one"]["persistent"], memory["mux:eight"]["persistent"]
    rows += [
        (f"peak, megatron-mux, {len(result['mix'])} tasks together", _mib(_peak(memory["mux:mix"]))),
        ("persistent, megatron-mux, 1 task", _mib(one)),
        (
            "persistent, megatron-mux, 8 tasks",
            f"{_mib(eight)} ({eight / one:.3f}x, goal {PERSISTENT_GOAL:.2f}x)",
        ),
    ]
    return [*table("memory | MiB", rows), *replicas(memory)]


def replicas(memory: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Say what share of the memory of as many processes of PEFT many tasks take together.

    Args:
        memory: Each case of the measurement, `mux:<number of tasks>` among them; else nothing is said.
    """
    lines: list[str] = []
    for count in [int(case[4:]) for case in memory if case.startswith("mux:") and case[4:].isdigit()]:
        ours = _peak(memory[f"mux:{count}"])
        for rival, name in PEFT_NAMES.items():
            cases = [found for case, found in memory.items() if case.startswith(f"{rival}:")]
            if cases:
                tasks = sum(found["tasks_of_this_kind"] for found in cases)
                one = sum(_peak(found) * found["tasks_of_this_kind"] for found in cases) / tasks
                text = (
                    f"{count} tasks together (the mix repeated) peak at {_mib(ours)} MiB, {count} processes with one "
                    f"task each ({name}) at {count} x {_mib(one)} MiB: **1/{count * one / ours:.1f} of the memory**. "
                    "One process of each batch shape was measured; its peak is multiplied."
                )
                lines += ["", text]
    return lines


def _peak(found: Mapping[str, int]) -> int:
    """Peak memory of a process beyond its interpreter and libraries, in bytes."""
    return found["peak"] - found.get("before_loading", 0)


def _losses(result: Mapping[str, Any]) -> list[str]:
    if "all" not in result:
        return []
    part = result["all"]
    sides = [*part["rivals"], "mux"]
    headings = " | ".join(f"last step ({SIDE_NAMES[side]})" for side in sides)
    rows = []
    for name in part["tasks"]:
        losses = [part["losses"][side][name] for side in sides]
        rows.append((name, f"{losses[0][0]:.4f}", *(f"{own[-1]:.4f}" for own in losses)))
    apart = ", ".join(
        f"{found['largest_relative_loss_difference']:.1e} ({RIVAL_NAMES[rival]})"
        for rival, found in part["rivals"].items()
    )
    explained = f"Largest relative difference of a loss in any step: {apart}."
    return [*table(f"loss | first step | {headings}", rows), "", explained]


def _profiles(result: Mapping[str, Any]) -> list[str]:
    """A table of time by kind of operator for each side that was profiled."""
    lines: list[str] = []
    for side, kinds in result.get("profile", {}).items():
        rows = operator_profile.rows(kinds, result["settings"]["steps_in_a_turn"])
        heading = f"{SIDE_NAMES[side]}: operators | share of profiled time | ms in a step | calls in a step"
        lines += ["", *table(heading, rows)]
    return lines[1:]


def _mib(count: float) -> str:
    return f"{count / 2**20:.0f}"
