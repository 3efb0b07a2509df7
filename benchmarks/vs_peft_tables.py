"""Renders the result of `vs_peft.py` as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from script import measured_on, table

TARGETS = {"all": 1.35, "short": 1.75}
CEILING_TARGET = 1.12
PERSISTENT_TARGET = 1.15
_SPEED_HEADINGS = (
    "tasks | PEFT, one at a time (tokens/s) | megatron-mux (tokens/s) | speed-up | "
    "ceiling: frozen backbone alone | step / ceiling | padding in PEFT's batches"
)


def markdown(result: Mapping[str, Any]) -> str:
    """Render hardware, speed, memory and losses."""
    return "\n".join([*_head(result), "", *_speed(result), "", *_memory(result), *_losses(result)])


def _head(result: Mapping[str, Any]) -> list[str]:
    hardware, settings = result["hardware"], result["settings"]
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads"
    tasks = ", ".join(f"{t['sequences']} x <= {t['max_length']}" for t in result["mix"])
    lora = settings["lora"]
    turns = f"{settings['repeats']} turns of {settings['steps_in_a_turn']} steps, medians"
    turns = f"records {settings['records']}; {turns}"
    return [
        measured_on(settings["backbone"], settings["dtype"], where, result["versions"]),
        f"Tasks (sequences x tokens a step): {tasks}; LoRA r={lora['r']} on {', '.join(lora['targets'])}; {turns}.",
    ]


def _speed(result: Mapping[str, Any]) -> list[str]:
    on_cpu = result["hardware"]["gpu"] is None
    rows = []
    for key, name in (("all", "the whole mix"), ("short", "its short tasks")):
        part = result[key]
        rate = part["tokens_per_second"]
        goal = f" (goal {TARGETS[key]:.2f}x)" if on_cpu else ""
        over = f" (goal {CEILING_TARGET:.2f})" if on_cpu and key == "all" else ""
        row = (
            f"{name} ({len(part['tasks'])})",
            f"{rate['peft']:.0f}",
            f"{rate['mux']:.0f}",
            f"**{part['speedup']:.2f}x**{goal}",
            f"{part['ceiling_speedup']:.2f}x",
            f"{part['step_over_ceiling']:.3f}{over}",
            f"{part['padding_share_of_peft']:.0%}",
        )
        rows.append(row)
    explained = "Tokens do not include padding, on either side."
    return [*table(_SPEED_HEADINGS, rows), "", explained]


def _memory(result: Mapping[str, Any]) -> list[str]:
    memory = result["memory"]
    if not memory:
        return []
    peft = {case: found for case, found in memory.items() if case.startswith("peft:")}
    largest = max(_peak(found) for found in peft.values())
    together = sum(_peak(found) * found["tasks_of_this_kind"] for found in peft.values())
    count = sum(found["tasks_of_this_kind"] for found in peft.values())
    one, eight = memory["mux:one"]["persistent"], memory["mux:eight"]["persistent"]
    rows = (
        (f"peak, PEFT, the largest of {count} tasks run one after the other", _mib(largest)),
        (f"peak, PEFT, {count} tasks at once, one process each", _mib(together)),
        (f"peak, megatron-mux, {count} tasks together", _mib(_peak(memory["mux:mix"]))),
        ("persistent, megatron-mux, 1 task", _mib(one)),
        (
            "persistent, megatron-mux, 8 tasks",
            f"{_mib(eight)} ({eight / one:.3f}x, goal {PERSISTENT_TARGET:.2f}x)",
        ),
    )
    return [*table("memory | MiB", rows), ""]


def _peak(found: Mapping[str, int]) -> int:
    """Peak memory of a process beyond its interpreter and libraries, in bytes."""
    return found["peak"] - found.get("before_loading", 0)


def _losses(result: Mapping[str, Any]) -> list[str]:
    part = result["all"]
    rows = []
    for name in part["tasks"]:
        theirs, ours = part["losses"]["peft"][name], part["losses"]["mux"][name]
        rows.append((name, f"{theirs[0]:.4f}", f"{theirs[-1]:.4f}", f"{ours[-1]:.4f}"))
    return [
        *table("loss | first step | last step (PEFT) | last step (megatron-mux)", rows),
        "",
        f"Largest relative difference of a loss in any step: {part['largest_relative_loss_difference']:.1e}.",
    ]


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}"
