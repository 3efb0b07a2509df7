"""What the loop has done between steps, in which order, and what it leaves alone when nothing is due."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mux.arguments import MuxArguments
from megatron_mux.engine import StepResult
from megatron_mux.errors import UserError
from megatron_mux.tasks.life import StateChange, TaskLives
from megatron_mux.training.callback import Callback, save_run
from megatron_mux.training.commands import OnlyDrain
from megatron_mux.training.loop import Loop
from megatron_mux.training.step_loop import StepLoop


class Recorder(Callback):
    """Notes each moment; asks for one every three steps of a task."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted
        self.saves = self.stops_early = False
        self.exits_after = 10**6

    def reason_to_exit(self, elapsed: float, is_training: bool) -> str:
        return "as told" if self.noted.count("after_steps") >= self.exits_after else ""

    def before_steps(self) -> None:
        self.noted.append("before_steps")

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        self.noted.append("in")
        yield
        self.noted.append("out")

    def due(self, seconds: float) -> Iterable[tuple[int, int]]:
        self.noted.append("due")
        return ()

    def after_first_steps(self, is_last: bool) -> None:
        self.noted.append(f"after_first_steps {is_last}")

    def after_steps(self, steps: int) -> None:
        self.noted.append("after_steps")

    def when_due(self, last: dict[str, StepResult]) -> None:
        self.noted.append("when_due")
        if self.stops_early:
            last["a"].status = "finished"  # type: ignore[misc]

    def tasks_to_save(self, last: dict[str, StepResult]) -> Collection[str]:
        return list(last) if self.saves else ()

    def before_save(self) -> None:
        self.noted.append("before_save")

    def save(self, names: Collection[str] | None, leaving: Sequence[str]) -> None:
        self.noted.append("save")

    def task_done(self, name: str, result: StepResult) -> None:
        self.noted.append(f"{name} is {result.status}")

    def after_last_steps(self) -> None:
        self.noted.append("after_last_steps")

    def finish(self) -> None:
        self.noted.append("finish")

    def close(self) -> None:
        self.noted.append("close")

    def state_changed(self, change: StateChange) -> None:
        self.noted.append(f"{change.name}: {change.old} to {change.new}")


class Engine:
    """One task of some steps, a step at a time."""

    def __init__(self, noted: list[str], total: int) -> None:
        self.noted, self.total, self.step = noted, total, 0
        self.active: tuple[str, ...] = ("a",)
        self.planning = SimpleNamespace(log_lines=["a new plan"])

    def progress(self, name: str) -> tuple[int, int, str]:
        return self.step, self.total, "running"

    def steps(self, most: int, timer: Any, next_steps: int) -> list[dict[str, Any]]:
        self.step += 1
        self.noted.append("steps")
        status = "finished" if self.step == self.total else "running"
        return [{"a": SimpleNamespace(step=self.step, status=status)}]

    def remove_task(self, name: str) -> None:
        self.noted.append(f"remove {name}")
        self.active = ()

    def close(self) -> None:
        self.noted.append("close the engine")


def made(total: int) -> tuple[Loop, Recorder]:
    """A loop, and the only callback of it."""
    noted: list[str] = []
    recorder = Recorder(noted)
    reporter: Any = SimpleNamespace(
        problem="",
        say=noted.append,
        step=lambda name, result, seconds: noted.append(f"report {result.step}"),
        untrack=lambda name: noted.append(f"untrack {name}"),
        stopped=lambda why, advice: noted.append(f"stopped {why}"),
    )
    registry: Any = SimpleNamespace(
        engine=Engine(noted, total),
        parallel=SimpleNamespace(
            world_size=1, most=list, total=list, heartbeat=SimpleNamespace(at=lambda what: None)
        ),
        reporter=reporter,
        callbacks=[Callback(), recorder],
        intervals={"a": (3,)},
        waiting=False,
        paused=[],
        lives=TaskLives(),
        preparing=False,
        follow=lambda commands, preparing: bool(commands),
        save=lambda names: save_run([recorder], names),
        admit=lambda: None,
        note=lambda name, result: noted.append(f"note {result.step}"),
        stop=lambda: None,
        close=lambda: noted.append("close the registry"),
    )
    arguments = MuxArguments.with_defaults()
    return Loop(
        arguments, registry, StepLoop(False, False), OnlyDrain(), lambda: noted.append("check")
    ), recorder


QUIET = ["before_steps", "due", "in", "steps", "out", "check"]


def bursts(noted: list[str]) -> list[list[str]]:
    """What was noted, burst by burst."""
    begins = [place for place, what in enumerate(noted) if what == "before_steps"]
    return [noted[begin:end] for begin, end in zip(begins, [*begins[1:], len(noted)], strict=True)]


def test_nothing_but_the_steps_and_their_report_where_nothing_is_due() -> None:
    loop, recorder = made(5)
    loop.run()
    found = bursts(recorder.noted)
    assert found[0] == [*QUIET, "after_first_steps False", "a new plan", "note 1", "report 1", "after_steps"]
    assert found[1] == [*QUIET, "after_first_steps True", "note 2", "report 2", "after_steps"]
    assert found[2] == [*QUIET, "note 3", "report 3", "after_steps", "when_due"]
    assert found[3] == [*QUIET, "note 4", "report 4", "after_steps"]


def test_a_save_comes_after_what_is_due_and_before_tasks_leave() -> None:
    loop, recorder = made(4)
    recorder.saves = True
    loop.run()
    loop.close()
    found = bursts(recorder.noted)
    assert found[2][-4:] == ["after_steps", "when_due", "before_save", "save"]
    saved = ["when_due", "before_save", "save", "a is finished", "untrack a", "remove a"]
    ended = ["before_save", "save", "after_last_steps", "finish"]
    closed = ["close the registry", "close", "close the engine"]
    assert found[3] == [*QUIET, "note 4", "report 4", "after_steps", *saved, *ended, *closed]


def test_a_callback_ends_the_run() -> None:
    loop, recorder = made(9)
    recorder.exits_after = 2
    loop.run()
    assert recorder.noted.count("steps") == 2 and recorder.noted[-1] == "stopped as told"
    assert recorder.noted[-5:-1] == ["before_save", "save", "after_last_steps", "finish"]


def test_a_problem_in_the_background_ends_the_run_before_the_next_steps() -> None:
    loop, recorder = made(9)
    recorder.problem = "the disk is full"
    with pytest.raises(UserError, match="the disk is full"):
        loop.run()
    assert recorder.noted == []


def test_no_line_is_written_once_the_directory_is_taken_over() -> None:
    loop, recorder = made(9)

    def check() -> None:
        raise UserError("taken over")

    loop.check = check
    with pytest.raises(UserError, match="taken over"):
        loop.run()
    assert "report 1" not in recorder.noted


def test_changes_are_told_before_the_next_steps_and_when_the_run_has_ended() -> None:
    loop, recorder = made(1)
    lives = loop.registry.lives
    lives.begin("a", "loading").to("running")
    loop.registry.stop = lambda: lives["a"].end("stopped")  # type: ignore[method-assign]
    loop.registry.paused.append("b")
    loop.run()
    assert recorder.noted[:3] == ["a: None to loading", "a: loading to running", "before_steps"]
    assert recorder.noted[-3:] == ["finish", "stopped with b paused", "a: running to stopped"]
    assert lives.changes == []
