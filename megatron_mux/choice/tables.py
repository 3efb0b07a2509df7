"""A ranking as people read it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_mux.choice.ranking import Ranked, Ranking
from megatron_mux.memory.question import OFFLOAD
from megatron_mux.memory.sizes import GIB, show_size

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 12
"""Methods in a table; programs get all of them."""
_CAPTION = (
    "here: whether this engine runs it; parts: micro-batches of a step on each pipeline; batch: sequences of one; "
    "GiB: of the worst rank; worst: its stage"
)


def show(console: Console, ranking: Ranking, impossible: Mapping[str, str], command: str) -> None:
    """Print a ranking.

    Args:
        console: Where to.
        ranking: The methods.
        impossible: Those that the model's sizes exclude, and why.
        command: What begins the command line that runs a method of ours.
    """
    from rich.table import Table

    count = len(ranking.entries)
    which = f"the first {_SHOWN} of {count} methods" if count > _SHOWN else f"{count} method(s)"
    table = Table(title=f"by closed forms of ours: {which}", caption=_CAPTION)
    table.add_column("method", no_wrap=True)
    table.add_column("")
    for column in ("fits", "here", "parts", "batch", "GiB", "worst", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in ranking.entries[:_SHOWN]:
        table.add_row(*_row(entry))
    console.print(table)
    for name, why in impossible.items():
        console.print(f"{name}: {why}", highlight=False)
    _show_choice(console, ranking, command)


def _row(entry: Ranked) -> list[str]:
    return [
        entry.method.name,
        entry.method.details,
        "yes" if entry.fits else "no",
        "no" if entry.elsewhere else "yes",
        str(entry.method.micro_batches),
        str(entry.batch),
        f"{entry.peak_process / GIB:.1f}",
        f"{entry.worst.stage + 1}/{entry.method.pipeline}",
        f"{entry.speed.throughput:,.0f}",
    ]


def _show_choice(console: Console, ranking: Ranking, command: str) -> None:
    best = ranking.chosen
    if best is None:
        nearest = f"; {ranking.entries[0].method.name} needs the least" if ranking.entries else ""
        console.print(f"selected: nothing: no method fits{nearest}", highlight=False)
        return
    parts = ", ".join(f"{part} {show_size(size)}" for part, size in best.breakdown.items() if size)
    offloaded = f"{OFFLOAD}: " if best.method.offload else ""
    details = f" ({best.method.details})" if best.method.details else ""
    many = "at most " if best.method.parts else ""
    batches = f"{many}{best.batch} sequence(s) in each of {best.method.micro_batches} micro-batch(es)"
    lines = [
        f"selected: {offloaded}{best.method.name}{details}, {batches}",
        f"its peak, at {best.worst.name}: {parts}",
        f"{' to '.join(map(show_size, best.interval))} by what is not known of context, NCCL and allocator",
    ]
    if best.host:
        lines.append(f"host memory: {show_size(best.host)} for each GPU")
    words = shlex.join(best.flags)
    if best.elsewhere:
        lines += [
            f"not by this engine ({best.elsewhere}); flags of {best.program}: {words}",
            *best.remarks,
        ]
    else:
        lines += [f"run it with: {command} {words}"]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
