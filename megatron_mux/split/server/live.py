"""The server's table in a terminal."""

from __future__ import annotations

import time

from rich.table import Table

from megatron_mux.split.server.metrics import Metrics
from megatron_mux.split.server.scheduler import Scheduler

_MIB = 1 << 20


def sessions_table(metrics: Metrics, scheduler: Scheduler, queued: int) -> Table:
    """The sessions, a row each, under the server's memory and queue."""
    reserved = (scheduler.capacity - scheduler.free) / _MIB
    memory = f"{reserved:.0f} of {scheduler.capacity / _MIB:.0f} MiB reserved"
    title = f"{len(metrics.sessions)} sessions, {queued} requests wait, {memory}"
    table = Table(title=title, title_justify="left")
    for heading in (
        "session",
        "step",
        "state",
        "requests",
        "rows/s",
        "waited",
        "computed",
        "MB in",
        "MB out",
    ):
        table.add_column(
            heading, justify="left" if heading in ("session", "state") else "right", no_wrap=True
        )
    now = time.monotonic()
    for name, session in metrics.sessions.items():
        seconds = max(now - session.since, 1e-9)
        table.add_row(
            name,
            f"{session.step}/{session.total_steps}",
            session.state,
            str(session.requests),
            f"{session.rows / seconds:.0f}",
            f"{session.waited_s:.1f} s",
            f"{session.computed_s:.1f} s",
            f"{session.received / 1e6:.1f}",
            f"{session.sent / 1e6:.1f}",
        )
    return table
