"""The tables of `gpu_memory.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from script import table

GIB = 1 << 30
GOALS = {"median": 0.01, "worst": 0.03}


def predicted_table(result: Mapping[str, Any]) -> str:
    """Render the predictions."""
    rows = [
        (name, f"{one['peak_allocated'] / GIB:.3f}", f"{one['peak_reserved'] / GIB:.3f}", one["moment"])
        for name, one in result["cases"].items()
    ]
    lines = [*table("case | allocated (GiB) | reserved (GiB) | moment of the peak", rows), ""]
    limits = [(one["case"], one["limit"] // GIB, one["largest"]) for one in result["limits"]]
    versions = ", ".join(f"{name} {number}" for name, number in result["predicted_with"].items())
    lines += table("case | limit (GiB) | largest batch", limits)
    return "\n".join(
        [f"Predicted with {versions}, for {result['predicted_for']}. Nothing is measured.", "", *lines]
    )


def error(predicted: float, measured: float) -> float:
    """Relative error with its sign."""
    return predicted / measured - 1


def measured_tables(result: Mapping[str, Any]) -> str:
    """Render predictions next to measurements, and compare the errors with the goals."""
    rows, errors = [], []
    exact = 0
    for name, one in result["cases"].items():
        measured = one["measured"]
        if "failed" in measured or not measured["fits"]:
            rows.append(
                (
                    name,
                    f"{one['peak_reserved'] / GIB:.3f}",
                    measured.get("failed") or measured["why"],
                    "",
                    "",
                    "",
                )
            )
            continue
        reserved = measured["peak_reserved"]
        errors.append(off := error(one["peak_reserved"], reserved))
        replayed = "replay_failed" not in measured and measured["first_event_replayed_otherwise"] is None
        exact += replayed
        rows.append(
            (
                name,
                f"{one['peak_reserved'] / GIB:.3f}",
                f"{reserved / GIB:.3f}",
                f"{off:+.2%}",
                f"{error(one['peak_allocated'], measured['peak_allocated']):+.2%}",
                "yes"
                if replayed
                else measured.get("replay_failed")
                or f"not event {measured['first_event_replayed_otherwise']}",
            )
        )
    head = ", ".join(f"{name} {number}" for name, number in result["machine"].items())
    head += f". Predicted for {result['predicted_for']}"
    titles = "case | reserved, predicted (GiB) | measured (GiB) | error | error of allocated | history replayed exactly"
    lines = [f"Measured on: {head}.", "", *table(titles, rows), ""]
    if errors:
        sizes = sorted(map(abs, errors))
        lines.append(
            f"Error of reserved memory: median {statistics.median(sizes):.2%} (goal {GOALS['median']:.0%}), "
            f"worst {sizes[-1]:.2%} (goal {GOALS['worst']:.0%}) of {len(sizes)} cases; "
            f"{exact} histories replayed exactly."
        )
    return "\n".join([*lines, "", *limit_table(result["limits"])])


def limit_table(limits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Render whether the predicted largest batch runs, and one more sequence."""
    rows = []
    for one in limits:
        least, most = (one["measured"][str(one["largest"] + more)] for more in (0, 1))
        outcomes = [ran.get("failed") or ("runs" if ran["fits"] else "does not fit") for ran in (least, most)]
        rows.append((one["case"], one["limit"] // GIB, one["largest"], *outcomes))
    return table("case | limit (GiB) | predicted largest batch | this batch | one more", rows)
