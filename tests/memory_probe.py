"""Peak of what is resident of this process (its own pages and mapped files' alike) while something runs."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from pathlib import Path
from types import TracebackType


def resident_bytes() -> int:
    """VmRSS of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell VmRSS")


class Peak:
    """`with Peak() as peak: ...; peak.grown` is the most that was held beyond the start, in bytes."""

    def __enter__(self) -> Peak:
        # What was freed but is still held would hide what is taken now.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._start = self._top = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._top = max(self._top, resident_bytes())
            time.sleep(0.0005)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._top = max(self._top, resident_bytes())

    @property
    def grown(self) -> int:
        """Bytes."""
        return self._top - self._start
