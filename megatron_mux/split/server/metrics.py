"""The server's figures: for Prometheus over HTTP, for a live table in the terminal, and as log lines."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from megatron_mux.errors import UserError

_SECONDS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class SessionFigures:
    """One session's figures since it joined.

    Attributes:
        step, total_steps: Optimizer steps.
        requests: Requests that were computed.
        rows: Rows of them.
        waited_s, computed_s: Seconds that they waited for memory and their turn, and were computed.
        received, sent: Bytes on the wire.
        reserved: Bytes that last while it is there.
        state: What it does: `joining`, `busy` (waiting or being computed), `away`, `idle`.
    """

    total_steps: int
    step: int = 0
    requests: int = 0
    rows: int = 0
    waited_s: float = 0.0
    computed_s: float = 0.0
    received: int = 0
    sent: int = 0
    reserved: int = 0
    state: str = "joining"
    since: float = field(default_factory=time.monotonic)


class Metrics:
    """The figures of all sessions and of the server.

    Attributes:
        sessions: By name.
        registry: What Prometheus reads.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, SessionFigures] = {}
        self.registry = reg = CollectorRegistry()
        prefix = "megatron_mux_split_"
        self.live = Gauge(f"{prefix}sessions", "Sessions that hold memory", registry=reg)
        self.queued = Gauge(
            f"{prefix}queued_requests", "Requests that wait for memory or their turn", registry=reg
        )
        self.memory = Gauge(f"{prefix}memory_bytes", "Memory by kind", ["kind"], registry=reg)
        self.requests = Counter(f"{prefix}requests", "Requests computed", ["kind"], registry=reg)
        self.rows = Counter(f"{prefix}rows", "Rows computed", ["kind"], registry=reg)
        self.refused = Counter(f"{prefix}refused", "Requests refused", ["code"], registry=reg)
        self.bytes = Counter(f"{prefix}wire_bytes", "Bytes of messages", ["direction"], registry=reg)
        self.steps = Counter(f"{prefix}optimizer_steps", "Optimizer steps", registry=reg)
        self.together = Counter(f"{prefix}computed_together", "Requests computed with others", registry=reg)
        self.wait = Histogram(
            f"{prefix}wait_seconds", "From a request's arrival to its start", buckets=_SECONDS, registry=reg
        )
        self.decision = Histogram(
            f"{prefix}decision_seconds",
            "A decision of the scheduler",
            buckets=(1e-6, 1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 1e-2),
            registry=reg,
        )

    def serve(self, address: str) -> None:
        """Answer Prometheus at `HOST:PORT/metrics`, in a thread.

        Raises:
            UserError: The address cannot be used.
        """
        host, _, port = address.rpartition(":")
        try:
            start_http_server(int(port), host or "127.0.0.1", registry=self.registry)
        except (OSError, ValueError, OverflowError) as error:
            raise UserError(f"--metrics {address}: {error}: give HOST:PORT with a free port") from None

    def exchanged(self, session: str, received: int, sent: int) -> None:
        """Count the bytes of a request and of its reply."""
        self.bytes.labels("received").inc(received)
        self.bytes.labels("sent").inc(sent)
        if (figures := self.sessions.get(session)) is not None:
            figures.received += received
            figures.sent += sent

    def computed(
        self, session: str, kind: str, rows: int, waited_s: float, computed_s: float, together: int
    ) -> None:
        """Count a request that was computed."""
        self.requests.labels(kind).inc()
        self.rows.labels(kind).inc(rows)
        self.wait.observe(waited_s)
        if together > 1:
            self.together.inc()
        if (figures := self.sessions.get(session)) is not None:
            figures.requests += 1
            figures.rows += rows
            figures.waited_s += waited_s
            figures.computed_s += computed_s


class JsonFormatter(logging.Formatter):
    """A log record as a line of JSON: time, level, event, and the fields it was given as `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """A log record as a line of text, with its fields behind the event."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        fields = getattr(record, "fields", {})
        told = "".join(f" {name}={json.dumps(value, default=str)}" for name, value in fields.items())
        head, *rest = super().format(record).split("\n", 1)
        return "\n".join([head + told, *rest])


def make_logger(form: str) -> logging.Logger:
    """The server's log on standard error.

    Args:
        form: `json` or `text`.
    """
    logger = logging.getLogger("megatron_mux.split")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger
