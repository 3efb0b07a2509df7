"""Renders the result of `gpu_table.py` as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from script import table

RIVALS = ("packed", "padded", "processes")
NAMES = {
    "packed": "PEFT, packed",
    "padded": "PEFT, padded",
    "processes": "PEFT, a process a task at once",
    "mux": "megatron-mux",
}
_SPEED = (
    "tasks | best rival | its tokens/s | tokens/s | speed-up | by GPU time | its idle share | idle share | "
    "TFLOP/s (as done) | share of a product (as done)"
)


def markdown(result: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Render speed, sides, memory and kinds of kernels."""
    machine, rows = about["machine"], result["rows"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"{machine['gpu']} ({machine['cpu']}), {machine['dtype']}. {versions}.",
        "A product of 8192 x 8192 matrices reaches "
        + ", ".join(sorted({f"{row['product'] / 1e12:.0f}" for row in rows.values()}))
        + " TFLOP/s.",
    ]
    measured = {name: row for name, row in rows.items() if "tokens_per_second" in row["sides"].get("mux", {})}
    if measured:
        speed = [_speed(name, row, row["product"]) for name, row in measured.items()]
        lines += ["", *table(_SPEED, speed)]
        sides = [line for name, row in measured.items() for line in _sides(name, row)]
        lines += ["", *table("tasks | side | tokens/s | tokens/s of GPU time | idle share | peak GiB", sides)]
    memory = [line for name, row in rows.items() for line in _memory(name, row)]
    lines += ["", *table("memory | together GiB | replicas GiB | share", memory)] if memory else []
    for name, row in measured.items():
        lines += _kinds(name, row)
    failed = [
        (name, side, found["failed"].strip().splitlines()[-1][:200])
        for name, row in rows.items()
        for side, found in row["sides"].items()
        if "failed" in found
    ]
    failed += [(name, "-", "it was not measured to its end") for name, row in rows.items() if not row["done"]]
    lines += ["", *table("failed | side | why", failed)] if failed else []
    return "\n".join(lines)


def best_by_clock(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """The rival with the most tokens per second, and their number; None: no rival was measured."""
    sides = row["sides"]
    found = {name: sides[name]["tokens_per_second"] for name in RIVALS if _is_measured(sides.get(name))}
    return max(found.items(), key=lambda item: item[1]) if found else None


def best_by_gpu(row: Mapping[str, Any]) -> float | None:
    """The most tokens per second of GPU time that a rival reaches, with any head; None: none was measured."""
    found: list[float] = []
    for name in RIVALS:
        side = row["sides"].get(name)
        if _is_measured(side):
            measured = [side, *side.get("heads", {}).values()]
            found += [
                one["gpu"]["tokens_per_second"]
                for one in measured
                if "tokens_per_second" in one.get("gpu", {})
            ]
    return max(found, default=None)


def _is_measured(side: Mapping[str, Any] | None) -> bool:
    return side is not None and "tokens_per_second" in side


def _speed(name: str, row: Mapping[str, Any], product: float) -> tuple[str, ...]:
    ours = row["sides"]["mux"]
    rate, gpu = ours["tokens_per_second"], ours["gpu"].get("tokens_per_second")
    rival, by_gpu = best_by_clock(row), best_by_gpu(row)
    side = row["sides"][rival[0]] if rival else {}
    label = "-" if rival is None else _label(rival[0], side)
    counted, done = (row["operations_a_token"][key] * rate for key in ("counted", "done"))
    return (
        name,
        label,
        f"{rival[1]:.0f}" if rival else "-",
        f"{rate:.0f}",
        f"**{rate / rival[1]:.2f}x**" if rival else "-",
        f"{gpu / by_gpu:.2f}x" if gpu and by_gpu else "-",
        _share(side.get("gpu", {}).get("idle")),
        _share(ours["gpu"].get("idle")),
        f"{counted / 1e12:.0f} ({done / 1e12:.0f})",
        f"{counted / product:.0%} ({done / product:.0%})",
    )


def _sides(name: str, row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for side, found in row["sides"].items():
        if not _is_measured(found):
            continue
        others = [head for head in found.get("heads", {}) if head != found["head"]]
        measured = [(f"{NAMES[side]}, {head} head", found["heads"][head]) for head in others]
        for label, one in [*measured, (_label(side, found), found)]:
            gpu = one.get("gpu", {})
            busy = f"{gpu['tokens_per_second']:.0f}" if "tokens_per_second" in gpu else "-"
            # The peak is that of the process that measures.
            peak = f"{one['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in one and side != "processes" else "-"
            lines.append(
                (name, label, f"{one['tokens_per_second']:.0f}", busy, _share(gpu.get("idle")), peak)
            )
    return lines


def _label(side: str, found: Mapping[str, Any]) -> str:
    return NAMES[side] + (f", {found['head']} head" if "head" in found else "")


def _memory(name: str, row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    found = row["sides"].get("memory", {})
    if not found.get("together"):
        return []
    together, replicas = found["together"], found["replicas"]
    return [(name, f"{together / 2**30:.1f}", f"{replicas / 2**30:.1f}", f"1/{replicas / together:.1f}")]


def _kinds(name: str, row: Mapping[str, Any]) -> list[str]:
    """A table of time by kind of kernel, with a column for each side."""
    sides = {side: found["gpu"] for side, found in row["sides"].items() if "kinds" in found.get("gpu", {})}
    kinds = sorted(
        {kind for gpu in sides.values() for kind in gpu["kinds"]},
        key=lambda kind: -max(gpu["kinds"].get(kind, {"seconds": 0})["seconds"] for gpu in sides.values()),
    )

    def cell(gpu: Mapping[str, Any], kind: str) -> str:
        total = sum(one["seconds"] for one in gpu["kinds"].values())
        one = gpu["kinds"].get(kind)
        if one is None:
            return "-"
        seconds, calls = one["seconds"], one["calls"] / gpu["steps"]
        return f"{seconds / total:.1%}, {1e3 * seconds / gpu['steps']:.1f} ms, {calls:.0f}"

    heading = " | ".join((f"{name}: share, ms and calls in a step", *(NAMES[side] for side in sides)))
    return ["", *table(heading, [(kind, *(cell(gpu, kind) for gpu in sides.values())) for kind in kinds])]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
