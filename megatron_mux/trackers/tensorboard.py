"""TensorBoard event files."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mux.errors import UserError
from megatron_mux.trackers.tracker import TrackedRun, Tracker


class EventFile:
    """A TensorBoard event file, flushed after every write.

    PyTorch's `SummaryWriter` writes in a thread of its own: a full disk would show there, as a stack trace, and here
    minutes later.

    Args:
        directory: Where TensorBoard looks; made if need be.
        asked: The flag or field that asks for it, for messages.

    Raises:
        UserError: The file cannot be made, or the package `tensorboard` is missing.
    """

    def __init__(self, directory: Path, asked: str = "--tensorboard-dir") -> None:
        self.directory = directory
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter

            directory.mkdir(parents=True, exist_ok=True)
            self._event = Event
            self._records: Any = RecordWriter(open(directory / name, "wb"))  # noqa: SIM115 (kept open for the run)
            self._write(file_version="brain.Event:2")
        except ImportError as error:
            raise UserError(
                f"{asked} {directory}: needs the package tensorboard: install it, or leave the flag out"
            ) from error
        except OSError as error:
            raise UserError(f"{asked} {directory}: {error.strerror or error}") from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step, each under its own tag.

        Raises:
            OSError: They cannot be written.
        """
        summary = {"value": [{"tag": tag, "simple_value": value} for tag, value in values.items()]}
        self._write(step=step, summary=summary)

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: What was written last did not reach the file.
        """
        self._records.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._records.flush()


class TensorboardTracker(Tracker):
    """Writes event files of the task alone, in `runs` of its directory."""

    def __init__(self, run: TrackedRun) -> None:
        self._events = EventFile(run.directory / "runs" / run.name, "training.report_to tensorboard")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._events.write(step, values)

    def close(self, finished: bool) -> None:
        """See `Tracker.close`."""
        self._events.close()
