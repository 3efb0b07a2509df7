"""Where commands come from, and that every rank gets the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_mux.training.commands import CommandQueue, Drain, Pause, Resume, SharedCommands, Submit
from megatron_mux.training.joining import STOP, WatchedDirectory

ALONE: Any = SimpleNamespace(world_size=1, rank=0)


def test_a_queue_gives_each_command_once_and_drains_from_then_on() -> None:
    queue = CommandQueue()
    assert queue.poll() == []
    queue.put(Pause("a"), Drain(), Resume("a"))
    assert queue.poll() == [Pause("a"), Resume("a"), Drain()]
    queue.put(Pause("b"))
    assert queue.poll() == [Pause("b"), Drain()] and queue.poll() == [Drain()]


def test_a_run_follows_a_directory_and_a_queue_at_once(tmp_path: Path) -> None:
    queue, file = CommandQueue(), tmp_path / "a.yaml"
    shared = SharedCommands([WatchedDirectory(tmp_path), queue], ALONE)
    assert shared.awaited == f"task files in {tmp_path} (a file {STOP} ends the run) or commands"
    file.write_text("name: a")
    queue.put(Pause("b"))
    assert shared.poll() == [Submit(file), Pause("b")]
