"""Parts of work in processes of their own: in order, and none waited for that is lost."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megatron_mux.dry_run.process import in_forks
from megatron_mux.memory.worker import WorkerError

_STATE = {"touched": False}


def _alone(part: int) -> tuple[int, bool, int]:
    before, _STATE["touched"] = _STATE["touched"], True
    time.sleep(0.02 * (3 - part))  # the first is done last
    return part, before, os.getpid()


def _die(part: int) -> int:
    if part == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60 * (part == 0))
    return part


def _raise(part: int) -> int:
    if part == 2:
        raise ValueError(f"part {part}")
    return part


def test_each_part_has_a_process_of_its_own_and_results_their_order() -> None:
    found = in_forks(_alone, range(4), 2)
    assert [(part, before) for part, before, _ in found] == [(part, False) for part in range(4)]
    assert len({pid for *_, pid in found} | {os.getpid()}) == 5 and not _STATE["touched"]


def test_a_killed_process_is_told_at_once_and_the_others_are_ended() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="-9"):
        in_forks(_die, range(3), 2)
    assert time.monotonic() - start < 20  # not the 60 s of the other


def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="part 2"):
        in_forks(_raise, range(4), 4)
    assert in_forks(_raise, [], 4) == []
