"""Who is taken in when several come: what is wrong with one task is nothing to those that waited before it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mux import checkpoint
from megatron_mux.checkpoint import SavedTask
from megatron_mux.data.dataset import DataFiles
from megatron_mux.errors import UserError
from megatron_mux.training import admitted_tasks
from megatron_mux.training import task_registry as module
from megatron_mux.training.callback import Callback
from megatron_mux.training.commands import Cancel, Command, Pause, Resume
from megatron_mux.training.joining import JoiningFile
from megatron_mux.training.task_registry import TaskRegistry


class Engine:
    """Has room for two tasks at a time, and cannot register those called `bad`."""

    def __init__(self) -> None:
        self.tasks: list[str] = []
        self.known: dict[str, Any] = {}
        self.done = 1

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(name for name in self.tasks if self.known[name].life.trains)

    def has_room(self, tasks: list[Any]) -> bool:
        return len({*self.tasks, *(task.spec.name for task in tasks)}) <= 2

    def check_alone(self, task: Any) -> None:
        pass

    def register_tasks(self, tasks: list[Any]) -> None:
        names = [task.spec.name for task in tasks]
        if "bad" in names:
            raise UserError("task 'bad': there is no memory for its adapter")
        self.tasks += names
        for task in tasks:
            task.life.to("running")

        self.known |= {task.spec.name: task for task in tasks}

    def task(self, name: str) -> Any:
        return self.known[name]

    def pause(self, name: str) -> None:
        self.known[name].life.to("paused")

    def resume(self, name: str) -> None:
        self.known[name].life.to("running")

    def remove_task(self, name: str) -> None:
        self.tasks.remove(name)

    def progress(self, name: str) -> tuple[int, int, str]:
        return self.done, 10, "running"


class Reporter:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.history: dict[str, Any] = {}

    def add(self, spec: Any, life: Any, step: int = 0, total_steps: int | None = None) -> None:
        self.history[spec.name] = SimpleNamespace(life=life)

    def track(self, spec: Any, step: int) -> None:
        """No tracker is asked for."""

    def prepare_tracking(self, specs: Any) -> str:
        return ""

    def say(self, text: str) -> None:
        self.said.append(text)


class Watcher(Callback):
    """Keeps which tasks began, and who left at each save."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.saved: list[Sequence[str]] = []

    def intervals(self, name: str) -> Iterable[int]:
        return 2, 5

    def before_first_step(self, names: Sequence[str]) -> None:
        self.began += names

    def save(self, names: Collection[str] | None, leaving: Sequence[str]) -> None:
        self.saved.append(leaving)


class Data(list[int]):
    """A data set of one record."""

    fingerprint = ""


def task(name: str) -> Any:
    spec = SimpleNamespace(
        name=name,
        adapter=SimpleNamespace(peft_type="LORA"),
        plain=dict,
        total_steps=lambda records: 10,
    )
    return SimpleNamespace(spec=spec, data=Data([1]), resume=None, lengths=(), reference_fingerprint=str)


@pytest.fixture
def registry() -> TaskRegistry:
    parallel = SimpleNamespace(world_size=1, heartbeat=SimpleNamespace(at=lambda what, long=False: None))
    made: Any = {
        "engine": Engine(),
        "parallel": parallel,
        "reporter": Reporter(),
        "info": SimpleNamespace(path=Path("backbone")),
        "files": DataFiles(None, print),
        "callbacks": [Watcher()],
    }
    return TaskRegistry(**made)


def join(registry: TaskRegistry, name: str) -> None:
    """As if its data had been tokenised."""
    registry._join(JoiningFile(Path(name), []), registry.files)


def test_a_task_that_waited_is_not_lost_with_one_that_is_refused(
    registry: TaskRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.register([task(name) for name in ("a", "b", "waits")])
    engine: Any = registry.engine
    assert engine.tasks == ["a", "b"] and registry.waiting
    engine.tasks.clear()  # both have left
    coming = [task("bad"), task("behind")]
    monkeypatch.setattr(module, "open_tasks", lambda *arguments: coming)
    join(registry, "bad.yaml")
    assert engine.tasks == ["waits"]
    assert registry.reporter.said[-1].startswith("bad.yaml refused: task 'bad'")  # type: ignore[attr-defined]
    engine.tasks.clear()
    registry.admit()
    assert engine.tasks == [] and not registry.waiting, "nobody of a refused file trains later"


def test_a_task_that_keeps_its_best_adapter_joins_no_run_that_saves_nothing(
    registry: TaskRegistry, tmp_path: Path
) -> None:
    registry.save_directory = None
    sections = "adapter: {peft_type: LORA}\ndata: {path: x}\neval: {path: y}\n"
    path = tmp_path / "best.yaml"
    path.write_text(f"name: a\n{sections}training: {{load_best_model_at_end: true}}\n")
    registry._prepare(path, None)
    said: list[str] = registry.reporter.said  # type: ignore[attr-defined]
    assert said[-1].startswith("best.yaml refused: training.load_best_model_at_end of a")
    assert not registry._joining.queue


def test_who_joins_while_others_train_is_not_evaluated_at_once(
    registry: TaskRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: Any = registry.callbacks[0]
    engine: Any = registry.engine
    engine.done = 0
    registry.register([task("a")])
    monkeypatch.setattr(module, "open_tasks", lambda *arguments: [task("b")])
    join(registry, "b.yaml")
    assert engine.tasks == ["a", "b"] and evaluated.began == ["a"]
    engine.tasks.clear()
    monkeypatch.setattr(module, "open_tasks", lambda *arguments: [task("c")])
    join(registry, "c.yaml")
    assert evaluated.began == ["a", "c"]


def test_a_file_is_refused_though_one_of_its_tasks_is_done_already(
    registry: TaskRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.entries["done"] = SavedTask("done", 10, "finished", "", "", {}, "")
    monkeypatch.setattr(admitted_tasks, "is_over", lambda one, entry: entry is not None)
    coming = [task("done"), task("bad")]
    monkeypatch.setattr(module, "open_tasks", lambda *arguments: coming)
    for one in coming:
        registry.lives.begin(one.spec.name, "joining")
    registry._join(JoiningFile(Path("bad.yaml"), [one.spec for one in coming]), registry.files)
    assert registry.reporter.said[-1].startswith("bad.yaml refused: task 'bad'")  # type: ignore[attr-defined]
    assert [registry.lives[name].state for name in ("done", "bad")] == ["finished", "refused"]


def told(registry: TaskRegistry, *commands: Command) -> list[str]:
    """What is said while commands are followed."""
    said: list[str] = registry.reporter.said  # type: ignore[attr-defined]
    before = len(said)
    registry.follow(commands, preparing=False)
    return said[before:]


def test_a_task_is_paused_and_goes_on_where_it_was(registry: TaskRegistry) -> None:
    registry.register([task("a"), task("b"), task("waits")])
    assert told(registry, Pause("a")) == ["a is paused"] and registry.engine.active == ("b",)
    assert registry.paused == ["a"] and [*registry.engine.tasks] == ["a", "b"], "it keeps its place"
    registry.admit()
    assert registry.waiting
    assert told(registry, Pause("waits")) == ["waits is paused"] and not registry.waiting
    assert told(registry, Resume("a")) == ["a trains from here on"] and registry.engine.active == ("a", "b")
    assert told(registry, Resume("waits")) == ["waits waits until there is room for it in memory"]
    assert told(registry, Pause("b"), Pause("a")) == ["b is paused", "a is paused"]
    registry.admit()
    assert registry.engine.active == ("waits",), "whoever waits may train alone"
    assert told(registry, Resume("a")) == ["a waits until there is room for it in memory"]
    assert registry.lives["a"].saved_status("") == "running"
    registry.engine.remove_task("waits")
    registry.engine.remove_task("b")
    registry.admit()
    assert registry.engine.active == ("a",) and registry.lives["a"].state == "running"


def test_what_cannot_be_is_refused_and_stops_nobody(registry: TaskRegistry) -> None:
    registry.register([task("a"), task("b")])
    registry.lives.begin("joins", "joining")
    registry.lives["b"].to("finished")
    assert told(
        registry,
        Pause("unknown"),
        Pause("b"),
        Pause("joins"),
        Resume("a"),
        Cancel("b"),
        Pause("a"),
        Pause("a"),
    ) == [
        "unknown cannot be paused: this run has no task of that name",
        "b cannot be paused: it is finished",
        "joins cannot be paused: it is joining",
        "a cannot be resumed: it is running, not paused",
        "b cannot be cancelled: it is finished",
        "a is paused",
        "a cannot be paused: it is paused",
    ]


def test_tasks_are_cancelled_by_their_names(registry: TaskRegistry) -> None:
    watcher: Any = registry.callbacks[0]
    registry.register([task(name) for name in ("a", "b", "waits", "waits-too")])
    spec: Any = SimpleNamespace(name="joins")
    registry._joining.queue.append(JoiningFile(Path("joins.yaml"), [spec]))
    registry.lives.begin("joins", "joining")
    names = ("a", "b", "waits", "waits-too", "joins")
    registry.follow([Pause("b"), Pause("waits")], preparing=True)
    registry.follow([Cancel(name) for name in names], preparing=True)
    assert registry.reporter.said[-5:] == [  # type: ignore[attr-defined]
        "a left: it was cancelled",
        "b left: it was cancelled",
        "waits left: it was cancelled",
        "waits-too left before there was room for it",
        "joins left before its data were tokenised",
    ]
    assert watcher.saved == [(), ["a"], ["b"], ["waits"]] and not registry.paused and not registry.waiting
    assert not registry.engine.tasks and not registry._joining.queue
    assert {registry.lives[name].state for name in names} == {"removed"}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_continued_run_keeps_a_task_paused_if_somebody_can_resume_it(
    keeps: bool, registry: TaskRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "load_task", lambda directory, entry: f"state of {entry.name}")
    registry.entries["a"] = SavedTask("a", 4, "paused", "", "a/checkpoint-4", {}, "")
    registry.keeps_pauses = keeps
    coming = task("a")
    registry.register([coming])
    assert coming.resume() == "state of a" and [*registry.engine.tasks] == ["a"] * (not keeps)
    if keeps:
        assert registry.paused == ["a"] and not registry.waiting
        registry.update_entries()
        assert registry.entries["a"].status == "paused"
        assert told(registry, Resume("a")) == ["a trains from here on"]
    assert registry.lives["a"].state == "running" and registry.engine.active == ("a",)
    registry.update_entries()
    assert registry.entries["a"].status == "running"
