"""Files are written whole, at the pace that is asked for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from megatron_mux import files
from megatron_mux.files import Pace, write


def test_pieces_of_any_size_are_joined(tmp_path: Path) -> None:
    pieces = [b"head", b"", bytes(range(256)) * (files._AT_ONCE // 100), b"tail"]
    write(tmp_path / "file", *pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_a_pace_is_kept_until_somebody_waits(tmp_path: Path) -> None:
    start = time.perf_counter()
    write(tmp_path / "file", bytes(3 * files._AT_ONCE), pace=Pace(10 * files._AT_ONCE))
    assert time.perf_counter() - start >= 0.3
    pace = Pace(1)
    threading.Timer(0.1, pace.lift).start()
    write(tmp_path / "file", bytes(3 * files._AT_ONCE), pace=pace)
    assert (tmp_path / "file").stat().st_size == 3 * files._AT_ONCE
