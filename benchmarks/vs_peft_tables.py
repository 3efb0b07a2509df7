"""Renders the result of `vs_peft.py` as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from script import measured_on, table

GOALS = {("padded", "all"): 1.35, ("padded", "short"): 1.75}
CEILING_GOAL = 1.12
PERSISTENT_GOAL = 1.15
RIVAL_NAMES = {"padded": "PEFT, padded batches", "packed": "PEFT, packed without padding"}
SIDE_NAMES = {**RIVAL_NAMES, "mux": "megatron-mux"}
_SPEED_HEADINGS = (
    "tasks | rival (PEFT: one task at a time) | rival (tokens/s) | megatron-mux (tokens/s) | speed-up | "
    "ceiling: frozen backbone alone | step / ceiling"
)


def markdown(result: Mapping[str, Any]) -> str:
    """Render hardware, speed, memory and losses."""
    parts = (_head, _speed, _memory, _losses)
    return "\n\n".join("\n".join(lines) for part in parts if (lines := part(result)))


def _head(result: Mapping[str, Any]) -> list[str]:
    mix = result["mix"]
    tasks = ", ".join(f"{t['batch']} x <= {t['max_length']}" for t in mix)
    ranks = "/".join(dict.fromkeys(str(task["rank"]) for task in mix))
    parts = [f"LoRA r={ranks} on {', '.join(result['targets'])}", f"records {result['records']}"]
    if "all" in result:
        parts.append(f"{result['repeats']} turns of {result['steps_in_a_turn']} steps, medians")
    return [measured_on(result), f"Tasks (sequences x tokens a step): {tasks}; {'; '.join(parts)}."]


def _speed(result: Mapping[str, Any]) -> list[str]:
    if "all" not in result:
        return []
    rows = []
    for key, name in (("all", "the whole mix"), ("short", "its short tasks")):
        part = result[key]
        rate = part["tokens_per_second"]
        over = f" (goal {CEILING_GOAL:.2f})" if key == "all" else ""
        for rival, found in part["rivals"].items():
            goal = GOALS.get((rival, key))
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
    for rival, name in RIVAL_NAMES.items():
        cases = [found for case, found in memory.items() if case.startswith(f"{rival}:")]
        if cases:
            count = sum(found["tasks_of_this_kind"] for found in cases)
            together = sum(_peak(found) * found["tasks_of_this_kind"] for found in cases)
            largest = f"peak, {name}, the largest of {count} tasks run one after the other"
            rows.append((largest, _mib(max(map(_peak, cases)))))
            rows.append((f"peak, {name}, {count} tasks at once, one process each", _mib(together)))
    one, eight = memory["mux:one"]["persistent"], memory["mux:eight"]["persistent"]
    growth = f"{_mib(eight)} ({eight / one:.3f}x, goal {PERSISTENT_GOAL:.2f}x)"
    rows += [
        (f"peak, megatron-mux, {len(result['mix'])} tasks together", _mib(_peak(memory["mux:mix"]))),
        ("persistent, megatron-mux, 1 task", _mib(one)),
        ("persistent, megatron-mux, 8 tasks", growth),
    ]
    return table("memory | MiB", rows)


def _peak(found: Mapping[str, int]) -> int:
    """Peak memory of a process beyond its interpreter and libraries, in bytes."""
    return found["peak"] - found["before_loading"]


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


def _mib(count: float) -> str:
    return f"{count / 2**20:.0f}"
