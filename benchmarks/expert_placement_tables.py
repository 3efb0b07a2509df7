"""The tables and plots of `expert_placement.py`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expert_placement_methods import METHODS, team_of
from script import table


def markdown(result: Mapping[str, Any]) -> str:
    """Render the tables."""
    setup = (
        f"{result['hardware']}. Three network namespaces with two workers each; {result['between_mb_s']:g} MB/s "
        f"between nodes, shared by a node's workers, {result['local_mb_s']:g} MB/s within; bf16; LoRA r=4 on q and v. "
        f"{result['rounds']} turns of {result['steps']} step(s) of each method, medians of seconds and means of "
        f"bytes; {result['minutes']:.0f} minutes."
    )
    columns = (
        "Against: expert parallelism with expert e on worker e mod N. Bytes are those between nodes, rows and "
        "results, by the exchange's counters. Compute: seconds of a step over links without limits, over those of a "
        "step. Interface: bytes without packets' headers that the nodes' uplinks counted, over what was sent and the "
        "adapters' gradients."
    )
    lines = [setup, "", columns]
    for case in result["cases"]:
        lines += ["", _heading(case), ""]
        usual = case["methods"].get("ep")
        rows: list[Sequence[object]] = []
        for name, own in case["methods"].items():
            rows.append(
                (
                    METHODS[name],
                    f"{own['mean_bytes'] / 1e6:.2f}",
                    _less(own["mean_bytes"], usual and usual["mean_bytes"]),
                    f"{own['predicted_bytes'] / own['mean_bytes'] - 1:+.1%}",
                    f"{own['median_s']:.2f}",
                    _less(own["median_s"], usual and usual["median_s"]),
                    f"{own['predicted_s'] / own['median_s'] - 1:+.1%}",
                    f"{own['compute_share']:.0%}",
                    f"{own['interface_payload'] / (own['mean_bytes'] + own['gradient_bytes']) - 1:+.1%}",
                )
            )
        lines += table(
            "placement | MB | against | predicted | seconds | against | predicted | compute | interface", rows
        )
    lines += ["", *_checks(result["cases"])]
    return "\n".join(lines)


def _heading(case: Mapping[str, Any]) -> str:
    slots = "no slot to spare" if case["slack"] == 1 else f"{case['slack']:g} slots for each expert"
    return (
        f"**{case['case']}, {slots}** ({case['tokens']} tokens in a step; entropy of experts' use "
        f"{case['entropy']:.3f} of its largest)"
    )


def _less(value: float, usual: float | None) -> str:
    return "" if usual is None else f"{value / usual - 1:+.1%}"


def _checks(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was to be shown, in a few lines."""
    own = [one for case in cases for one in case["methods"].values()]
    equal = all(one["routed_equals_sent"] for one in own)
    interface = max(
        abs(one["interface_payload"] / (one["mean_bytes"] + one["gradient_bytes"]) - 1) for one in own
    )
    bytes_off = max(abs(one["predicted_bytes"] / one["mean_bytes"] - 1) for one in own)
    off = [abs(one["predicted_s"] / one["median_s"] - 1) for one in own]
    within = sum(value <= 0.1 for value in off)
    said = (
        f"Bytes by the selected experts and the placement {'equal' if equal else 'DIFFER FROM'} what was sent, in "
        f"every step. Interfaces differ by {interface:.1%} at most, predicted bytes by {bytes_off:.1%}, predicted "
        f"seconds by {max(off):.1%} (median {statistics.median(off):.1%}; {within} of {len(off)} within 10%)."
    )
    return [said]


def short(case: Mapping[str, Any]) -> str:
    """A case in a few lines of progress."""
    lines = [f"{case['case']}, slack {case['slack']}: entropy {case['entropy']:.3f}"]
    usual = case["methods"].get("ep") or next(iter(case["methods"].values()))
    for name, own in case["methods"].items():
        seconds, size = own["median_s"], own["mean_bytes"]
        payload = own["interface_payload"] / (size + own["gradient_bytes"])
        figures = [
            f"{seconds:.3f} s ({seconds / usual['median_s'] - 1:+.1%}",
            f"predicted {own['predicted_s'] / seconds - 1:+.1%}",
            f"{own['rest_s']:.2f} s of compute)",
            f"{size / 1e6:.2f} MB ({size / usual['mean_bytes'] - 1:+.1%}",
            f"predicted {own['predicted_bytes'] / size - 1:+.1%})",
            f"interface {payload - 1:+.1%}",
            "as routed" if own["routed_equals_sent"] else "NOT AS ROUTED",
        ]
        lines.append(f"  {name:10} {', '.join(figures)}")
    return "\n".join(lines)


def draw(result: Mapping[str, Any], output: Path) -> None:
    """Draw two plots beside the result: what each method saves, and bytes of each step over the run."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so no plot is drawn", file=sys.stderr)
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "expert-placement"
    cases = [case for case in result["cases"] if "ep" in case["methods"]]
    if cases:
        _draw_savings(cases, output.with_suffix(".svg"))
    if result["traffic"]:
        _draw_traffic(result["traffic"], output.with_name(f"{output.stem}-steps.svg"))


def _draw_savings(cases: Sequence[Mapping[str, Any]], file: Path) -> None:
    from matplotlib import pyplot

    figure, both = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True)
    names = [name for name in METHODS if name != "ep" and any(name in case["methods"] for case in cases)]
    width = 0.8 / len(names)
    for axes, key, label in zip(
        both, ("mean_bytes", "median_s"), ("bytes between nodes", "seconds"), strict=True
    ):
        for i, name in enumerate(names):
            places = [j + (i - len(names) / 2 + 0.5) * width for j in range(len(cases))]
            values = [case["methods"][name][key] / case["methods"]["ep"][key] for case in cases]
            axes.bar(places, values, width, label=METHODS[name])
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_ylabel(f"{label}, of e mod N's")
    both[0].legend(fontsize=7, ncols=3)
    both[1].set_xticks(
        range(len(cases)), [f"{case['case']}\n{case['slack']:g}x slots" for case in cases], fontsize=7
    )
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def _draw_traffic(traffic: Mapping[str, Mapping[str, Sequence[float]]], file: Path) -> None:
    from matplotlib import pyplot

    figure, every = pyplot.subplots(1, len(traffic), figsize=(5 * len(traffic), 3.5), squeeze=False)
    for axes, (case, methods) in zip(every[0], traffic.items(), strict=True):
        for name, sizes in methods.items():
            style = "--" if team_of(name) == "ep" else "-"
            axes.plot([size / 1e6 for size in sizes], style, label=METHODS[name], linewidth=1)
        axes.set_title(case, fontsize=9)
        axes.set_xlabel("step")
        axes.set_ylabel("MB between nodes in a step")
        axes.set_ylim(bottom=0)
    every[0][0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
