"""The tables and plots of `expert_placement.py`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expert_placement_methods import METHODS, PREDICTED, team_of
from script import table


def markdown(result: Mapping[str, Any]) -> str:
    """Render the tables."""
    setup = (
        f"{result['hardware']}. Three network namespaces with two workers each; links between nodes, shared by a "
        "node's workers, are a sixteenth as fast as those within; bf16; LoRA r=4 on q and v. "
        f"{result['cases'][0]['rounds']} turns of a step of each method, medians of seconds and means of bytes; "
        f"{result['minutes']:.0f} minutes."
    )
    meaning = (
        "In brackets: entropy of experts' use, of its largest value. Against: expert parallelism with expert e on "
        "worker e mod N. Bytes are those between nodes, rows and "
        "results, by the exchange's counters. Compute: seconds of a step over links without limits, over those of a "
        "step. Interface: bytes without packets' headers that the nodes' uplinks counted, over what was sent and the "
        "adapters' gradients. Least possible: no placement with a master and without replicas sends fewer bytes. One "
        "distant manager: of each layer the hottest experts are near the master, the others on one manager where there "
        "is room. Predictions are against expert parallelism's."
    )
    lines = [setup, "", *_summary(result["cases"]), meaning]
    for case in result["cases"]:
        lines += ["", _heading(case), ""]
        usual = case["methods"]["ep"]
        rows = [
            (
                METHODS[name],
                f"{own['mean_bytes'] / 1e6:.2f}",
                _less(own["mean_bytes"], usual["mean_bytes"]),
                _less(own["predicted_bytes"], own["mean_bytes"]),
                f"{own['median_s']:.2f}",
                _less(own["median_s"], usual["median_s"]),
                _less(own["predicted_s"], own["median_s"]),
                f"{own['compute_share']:.0%}",
                _less(own["interface_payload"], own["mean_bytes"] + own["gradient_bytes"]),
            )
            for name, own in case["methods"].items()
        ]
        columns = "placement | MB | against | predicted | seconds | against | predicted | compute | interface"
        lines += table(columns, rows)
    return "\n".join([*lines, "", _checks(result["cases"])])


def _summary(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Bytes and seconds of all methods against expert parallelism, measured and predicted, for each number of slots."""
    lines: list[str] = []
    for slack in sorted({case["slack"] for case in cases}):
        own = [case for case in cases if case["slack"] == slack]
        named = [f"{case['case']} ({case['entropy']:.2f})" for case in own]
        others = [name for name in METHODS if name != "ep"]
        measured = [(METHODS[name], *(_measured(case, name) for case in own)) for name in others]
        predicted = [(label, *(_predicted(case, name) for case in own)) for name, label in PREDICTED.items()]
        heading = f"{_slots(slack)}: bytes, seconds against EP"
        lines += [*table(" | ".join([heading, *named]), measured), ""]
        lines += [*table(" | ".join([f"predicted, {_slots(slack)}", *named]), predicted), ""]
    return lines


def _measured(case: Mapping[str, Any], name: str) -> str:
    own, ep = case["methods"][name], case["methods"]["ep"]
    return ", ".join(_less(own[key], ep[key]) for key in ("mean_bytes", "median_s"))


def _predicted(case: Mapping[str, Any], name: str) -> str:
    ep = case["methods"]["ep"]
    return ", ".join(_less(value, ep[f"predicted_{key}"]) for key, value in case["predicted"][name].items())


def _slots(slack: float) -> str:
    return "no slot to spare" if slack == 1 else f"{slack:g} slots for each expert"


def _heading(case: Mapping[str, Any]) -> str:
    return (
        f"**{case['case']}, {_slots(case['slack'])}** ({case['between_mb_s']:g} MB/s between nodes, "
        f"{case['local_mb_s']:g} MB/s within; {case['tokens']} tokens in a step; entropy of experts' use "
        f"{case['entropy']:.3f} of its largest)"
    )


def _less(value: float, usual: float) -> str:
    return f"{value / usual - 1:+.1%}"


def _checks(cases: Sequence[Mapping[str, Any]]) -> str:
    """What was to be shown, in a few lines."""
    own = [one for case in cases for one in case["methods"].values()]
    equal = all(one["routed_equals_sent"] for one in own)
    interface = max(
        abs(one["interface_payload"] / (one["mean_bytes"] + one["gradient_bytes"]) - 1) for one in own
    )
    bytes_off = max(abs(one["predicted_bytes"] / one["mean_bytes"] - 1) for one in own)
    off = [abs(one["predicted_s"] / one["median_s"] - 1) for one in own]
    within = sum(value <= 0.1 for value in off)
    shares = [case["methods"]["ep"]["compute_share"] for case in cases]
    every = sorted(one["compute_share"] for one in own)
    return (
        f"Bytes by the selected experts and the placement {'equal' if equal else 'DIFFER FROM'} what was sent, in "
        f"every step. Interfaces differ by {interface:.1%} at most, predicted bytes by {bytes_off:.1%}, predicted "
        f"seconds by {max(off):.1%} (median {statistics.median(off):.1%}; {within} of {len(off)} within 10%)."
        f" Computing takes {min(shares):.0%} to {max(shares):.0%} of the steps of expert parallelism, at most "
        f"{every[-1]:.0%} of any method's, and at most 30% in {sum(one <= 0.3 for one in every)} of {len(every)}."
    )


def draw(result: Mapping[str, Any], output: Path) -> None:
    """Draw two plots beside the result: what each method saves, and bytes of each step over the run."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so no plot is drawn", file=sys.stderr)
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "expert-placement"
    _draw_savings(result["cases"], output.with_suffix(".svg"))
    if result["traffic"]:
        _draw_traffic(result["traffic"], output.with_name(f"{output.stem}-steps.svg"))


def _draw_savings(cases: Sequence[Mapping[str, Any]], file: Path) -> None:
    from matplotlib import pyplot

    slacks = sorted({case["slack"] for case in cases})
    figure, every = pyplot.subplots(
        2,
        len(slacks),
        figsize=(6.5 * len(slacks), 6),
        squeeze=False,
        sharex="col",
        sharey="row",
        layout="constrained",
    )
    names = [name for name in METHODS if name != "ep"]
    width = 0.8 / len(names)
    for column, slack in enumerate(slacks):
        own = [case for case in cases if case["slack"] == slack]
        for axes, key in zip(every[:, column], ("mean_bytes", "median_s"), strict=True):
            for i, name in enumerate(names):
                places = [j + (i - len(names) / 2 + 0.5) * width for j in range(len(own))]
                values = [case["methods"][name][key] / case["methods"]["ep"][key] for case in own]
                axes.bar(places, values, width, label=METHODS[name])
            axes.axhline(1, color="grey", linewidth=0.8)
        every[0][column].set_title(f"{slack:g} slots for each expert", fontsize=9)
        every[1][column].set_xticks(range(len(own)), [case["case"] for case in own], fontsize=8)
    for axes, label in zip(every[:, 0], ("bytes between nodes", "seconds"), strict=True):
        axes.set_ylabel(f"{label}, of e mod N's")
    handles, labels = every[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", fontsize=8, ncols=3)
    figure.savefig(file, metadata={"Date": None})


def _draw_traffic(traffic: Mapping[str, Mapping[str, Sequence[float]]], file: Path) -> None:
    from matplotlib import pyplot

    columns = min(3, len(traffic))
    rows = -(-len(traffic) // columns)
    size = (4 * columns, 2.8 * rows + 0.6)
    figure, every = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in every.flat[len(traffic) :]:
        axes.set_axis_off()
    for axes, (case, methods) in zip(every.flat, traffic.items(), strict=False):
        for name, sizes in methods.items():
            style = "--" if team_of(name) == "ep" else "-"
            axes.plot([size / 1e6 for size in sizes], style, label=METHODS[name], linewidth=1)
        axes.set_title(case, fontsize=9)
        axes.set_ylim(bottom=0)
    for axes in every[:, 0]:
        axes.set_ylabel("MB between nodes")
    for axes in every[-1]:
        axes.set_xlabel("step")
    handles, labels = every[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", fontsize=8, ncols=4)
    figure.savefig(file, metadata={"Date": None})
