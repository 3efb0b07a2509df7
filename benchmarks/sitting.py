"""Measurements in several sittings: each result is kept as soon as there is one, and a later call goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.files import write_atomically


class Sitting:
    """The time of one call.

    Args:
        minutes: How long the call may take; None: no limit.
        clock: Seconds that have passed, from any start.
    """

    def __init__(self, minutes: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if minutes is None else clock() + 60 * minutes

    def has_time(self, seconds: float) -> bool:
        """Whether something that takes so many seconds at most ends in time."""
        return self._end is None or self._clock() + seconds <= self._end


class Kept:
    """Results in a file of JSON, which is written atomically at each one.

    Args:
        file: The file; what an earlier call has kept in it is in `found`.
        about: What all results depend on.
        empty: `found` before the first result.

    Raises:
        SystemExit: The file holds results that depend on something else.
    """

    def __init__(self, file: Path, about: Mapping[str, Any], empty: Mapping[str, Any]) -> None:
        self._file, self._about = file, dict(about)
        self.found: dict[str, Any] = {**empty}
        if file.exists():
            self.found = json.loads(file.read_text())
            if self.found.pop("about", None) != json.loads(json.dumps(self._about)):
                print(
                    f"{file}: holds results of other sources, versions or predictions: move it away",
                    file=sys.stderr,
                )
                raise SystemExit(2)

    def keep(self) -> None:
        """Write `found`, after a result was added to it."""
        write_atomically(self._file, json.dumps({"about": self._about, **self.found}, indent=1) + "\n")


def tell_left(left: int, of: int) -> None:
    """Say on standard error how much is left for another call, if anything is."""
    if left:
        print(f"{left} of {of} left: run the same command again", file=sys.stderr)
