"""The tables and plots of `split.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from script import table

_POLICIES = ("preserve", "reforward-with-gradients", "on-demand", "auto")
_TABLES = (
    ("step_s", "Seconds of an optimizer step"),
    ("communication_s", "Seconds of communication in a step (Menos, Table 1)"),
    ("computation_s", "Seconds of computing on the server in a step (Table 2)"),
    ("scheduling_s", "Seconds of waiting on the server in a step (Table 3)"),
    ("client_s", "Seconds of the rest of a step: the client's layers and optimizer"),
    ("p99_wait_s", "99th percentile of a request's wait, in seconds"),
    ("jain", "Jain's index of clients' steps a second"),
    ("most_reserved", "MiB reserved at most, without shared weights"),
)
_BACKBONES = {"random": "the random Llama", "backbone": "SmolLM2-135M"}
_MIB = 1 << 20


def markdown(result: Mapping[str, Any]) -> str:
    """Render the tables, and each goal with what was measured."""
    lines = [f"{result['hardware']}; {result['minutes']:.0f} minutes."]
    if result["cases"]:
        lines += _setup(result["setup"])
        for key, title in _TABLES:
            lines += ["", f"**{title}**", "", *_grid(result["cases"], key)]
        lines += ["", *_whole(result["cases"])]
    if "ranks" in result:
        lines += ["", *_ranks(result["ranks"])]
    if "together" in result:
        lines += ["", *_together(result["together"])]
    if "memory" in result:
        lines += ["", *_memory(result["memory"])]
    lines += ["", "**Goals**", "", *table("goal | measured | ", goals(result))]
    return "\n".join(lines)


def _setup(setup: Mapping[str, Any]) -> list[str]:
    where = (
        f"A server and its clients, each in a network namespace with a link of {setup['bandwidth'] / 1e6:g} MB/s in "
        f"each direction; mTLS; fp32 on the wire. A random Llama of {setup['layers']} layers "
        f"(hidden {setup['hidden']}), cut 1/0; LoRA r=8 on q and v; {setup['rows']} tokens in a step. One thread for "
        "each process; no co-batching. Measured from when all clients had done a step, until each had done "
        f"{setup['steps']} more or for {setup['most_s']:g} s."
    )
    return [where, "", f"`--memory-limit` of all policies: {setup['reason']}"]


def _grid(cases: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    counts = sorted({case["clients"] for case in cases})
    rows = []
    for policy in _POLICIES:
        own = {case["clients"]: case for case in cases if case["policy"] == policy}
        if own:
            rows.append((policy, *(_cell(own.get(count), key) for count in counts)))
    return table(" | ".join(["policy", *(f"{count} clients" for count in counts)]), rows)


def _cell(case: Mapping[str, Any] | None, key: str) -> str:
    if case is None or case[key] is None:
        return ""
    if key == "most_reserved":
        return f"{case[key] / _MIB:.1f} of {case['capacity'] / _MIB:.1f}"
    mark = "" if case["is_whole"] or key not in ("step_s", "scheduling_s") else "*"
    mark = ">= " if key == "p99_wait_s" and not case["is_whole"] else mark
    text = f"{case[key]:.3f}"
    return mark + text if mark == ">= " else text + mark


def _whole(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    if all(case["is_whole"] for case in cases):
        return []
    note = (
        "\\* Some client ended fewer than two steps: a step's time is the number of clients over the steps that all of "
        "them ended a second (Little's law), and waiting is what its other parts leave."
    )
    return [note]


def _ranks(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    head = (
        "**Body on several pipeline ranks** (Figure 10), `on-demand`, without a memory limit: all ranks share the two "
        "cores, so this shows what telling the other ranks costs, not what they gain."
    )
    keys = ("step_s", "communication_s", "computation_s", "scheduling_s")
    rows = [(case["ranks"], case["clients"], *(f"{case[key]:.3f}" for key in keys)) for case in cases]
    names = "ranks | clients | seconds of a step | communication | computing | waiting"
    return [head, "", *table(names, rows)]


def _together(found: Mapping[str, Any]) -> list[str]:
    def median(values: Sequence[float]) -> str:
        return f"{sorted(values)[len(values) // 2]:.0f}"

    rows = [
        (
            own["rows"],
            median(own["rows_per_s"]["alone"]),
            median(own["rows_per_s"]["together"]),
            f"{own['speed_up']:.2f}x",
        )
        for own in found["sizes"]
    ]
    backbone = _BACKBONES.get(found["backbone"], found["backbone"])
    head = (
        f"**Co-batching**: {found['clients']} clients without layers of their own send requests as fast as they are "
        f"answered, over links without limits, to two servers in turns ({backbone}; at most "
        f"{found['most_together']} rows together, as the server measured at its start). Tokens a second, forward and "
        "backward; medians of turns."
    )
    return [head, "", *table("tokens of a request | one by one | together | speed-up", rows)]


def _memory(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            own["clients"],
            *(f"{value / _MIB:.0f}" for value in (other["persistent"], own["persistent"])),
            f"{own['persistent'] / other['persistent'] - 1:+.1%}",
            *(f"{value / _MIB:.0f}" for value in (other["resident"], own["resident"], own["measured"])),
            f"{own['predicted'] / own['measured'] - 1:+.2%}",
        )
        for own, other in zip(found["shared"], found["copies"], strict=True)
    ]
    head = (
        f"**Memory** in MiB: storages of live tensors between requests, each once, and the resident size beside. "
        f"Equation 3, M + (A + O) x N + I, for requests of {found['rows']} tokens, against the most bytes during one: "
        "with A, O and I as predicted before anything is allocated."
    )
    names = "clients | a copy each | shared | against | copies, resident | shared, resident | shared, with a request"
    return [head, "", *table(f"{names} | equation 3", rows)]


def goals(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Each goal that was measured: what it is, what came out, and whether it is reached."""
    cases = {(case["policy"], case["clients"]): case for case in result["cases"]}
    found: list[tuple[str, str, str]] = []

    def add(goal: str, value: float, text: str, reached: bool) -> None:
        found.append((goal, text.format(value), "reached" if reached else "MISSED"))

    own = {count: case for (policy, count), case in cases.items() if policy == "on-demand"}
    if 1 in own:
        share = own[1]["communication_s"] / own[1]["step_s"]
        add("communication >= 80% of a step alone", share, "{:.0%}", share >= 0.8)
    if {1, 4} <= own.keys():
        grows = own[4]["step_s"] / own[1]["step_s"]
        add("a step grows <= 1.3x from 1 to 4 clients (on-demand)", grows, "{:.2f}x", grows <= 1.3)
    if 16 in own and ("preserve", 16) in cases:
        less = cases["preserve", 16]["scheduling_s"] / own[16]["scheduling_s"]
        add("waiting at 16 clients >= 5x below preserve's (on-demand)", less, "{:.1f}x", less >= 5)
    if indices := [case["jain"] for case in cases.values() if case["jain"] is not None]:
        add("Jain's index >= 0.95, least of all cases", min(indices), "{:.3f}", min(indices) >= 0.95)
    if "together" in result:
        ratios = {one["rows"]: one["speed_up"] for one in result["together"]["sizes"]}
        if small := [ratio for rows, ratio in ratios.items() if rows <= 64]:
            add("co-batching >= 1.2x for at most 64 tokens, least", min(small), "{:.2f}x", min(small) >= 1.2)
        add("co-batching never < 0.97x", min(ratios.values()), "{:.2f}x", min(ratios.values()) >= 0.97)
    if "memory" in result:
        shared, copies = result["memory"]["shared"], result["memory"]["copies"]
        if len(shared) >= 4:
            saved = 1 - shared[3]["persistent"] / copies[3]["persistent"]
            add("persistent memory of 4 clients >= 70% below a copy for each", saved, "{:.1%}", saved >= 0.7)
        off = max(abs(one["predicted"] / one["measured"] - 1) for one in shared)
        add("equation 3 within 5%, worst", off, "{:.2%}", off <= 0.05)
    return found
