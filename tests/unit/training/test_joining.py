"""Files that join wait for their data one after the other, and may leave before their turn."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenised_file import Reading, as_source
from megatron_mux.errors import UserError
from megatron_mux.training import joining
from megatron_mux.training.commands import Cancel, Drain, Submit
from megatron_mux.training.joining import STOP, JoiningFiles, WatchedDirectory


class Process:
    """In the place of `BackgroundTokenising`: done when it is told to be."""

    made: list[Process]

    def __init__(self, backbone: Path, readings: list[Reading], cache: Path | None) -> None:
        self.paths = [source.label for source, _ in readings]
        self.losses = [loss for _, loss in readings]
        self.log_lines = ["half of it"]
        self.results: dict[str, Any] | None = None
        self.cancelled = False
        self.made.append(self)

    def poll(self) -> bool:
        return self.results is not None

    def cancel(self) -> None:
        self.cancelled = True


def specs(name: str, *paths: str, loss: str = "sft") -> list[Any]:
    evaluation = SimpleNamespace(source=as_source("held-out"))
    return [
        SimpleNamespace(
            name=f"{name}-{p}",
            data=SimpleNamespace(sources=(as_source(p),)),
            eval=evaluation,
            training=SimpleNamespace(loss=loss),
        )
        for p in paths
    ]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> JoiningFiles:
    Process.made = []
    monkeypatch.setattr(joining, "BackgroundTokenising", Process)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    alone: Any = SimpleNamespace(world_size=1, rank=0)
    tokenizer: Any = SimpleNamespace(name_or_path="backbone")
    return JoiningFiles(DataFiles(tokenizer, print), alone)


def test_one_file_at_a_time(files: JoiningFiles) -> None:
    assert not files.queue and not files.preparing and files.log_lines() == []
    files.add(Path("a.yaml"), specs("a", "x", "y"))
    files.add(Path("b.yaml"), specs("b", "z", loss="dpo"))
    assert [process.paths for process in Process.made] == [["x", "y", "held-out", "held-out"]]
    assert files.preparing and files.names == ["a-x", "a-y", "b-z"]
    assert files.log_lines() == ["half of it"] and files.log_lines() == []
    results: Any = {"x": "tokens"}
    Process.made[0].results = results
    assert not files.preparing
    file, opened = files.take()
    assert (file.path, opened.tokenised) == (Path("a.yaml"), results)
    assert [process.paths for process in Process.made[1:]] == [["z", "held-out"]] and files.preparing
    assert Process.made[1].losses == ["dpo", "dpo"]


def test_a_file_waits_for_the_prediction_of_its_memory(files: JoiningFiles) -> None:
    work: Future[None] = Future()
    asked: list[Any] = []

    def predict(specs: Any) -> Future[None] | None:
        asked.append(specs)
        return work if len(asked) == 1 else None

    files.predict = predict
    first, second = specs("a", "x"), specs("b", "y")
    files.add(Path("a.yaml"), first)
    files.add(Path("b.yaml"), second)
    results: Any = {}
    Process.made[0].results = results
    assert files.preparing and asked == [first]
    work.set_exception(UserError("asked again, it is said who is at fault"))
    assert not files.preparing
    files.take()
    assert asked == [first, second]


def test_a_file_that_leaves_ends_its_process(files: JoiningFiles) -> None:
    for name in "abc":
        files.add(Path(f"{name}.yaml"), specs(name, name))
    assert files.cancel(Path("b.yaml")) and not files.cancel(Path("b.yaml"))
    assert files.cancel(Path("a.yaml"))
    first, second = Process.made
    assert first.cancelled and second.paths == ["c", "held-out"]
    files.close()
    assert second.cancelled and not files.queue


def test_a_task_leaves_the_others_of_its_file_alone(files: JoiningFiles) -> None:
    files.add(Path("a.yaml"), specs("a", "x", "y"))
    files.add(Path("b.yaml"), specs("b", "z"))
    files.drop("a-x")
    assert files.names == ["a-y", "b-z"] and not Process.made[0].cancelled
    files.drop("a-y")
    assert files.names == ["b-z"] and Process.made[0].cancelled and len(Process.made) == 2


def test_other_ranks_of_a_host_leave_it_to_the_first(
    files: JoiningFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 2 and 3 are on the second host, whose own leader's results are theirs."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    files.parallel = SimpleNamespace(world_size=4, rank=3)  # type: ignore[assignment]
    files.add(Path("a.yaml"), specs("a", "x"))
    assert Process.made == [] and not files.preparing

    def gather(found: list[Any], own: Any) -> None:
        assert own is None
        found[:] = [{"x": "on the first host"}, None, {"x": "on the second"}, None]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    found: Any = files.take()[1].tokenised
    assert found == {"x": "on the second"}


# -- the watched directory


def test_files_come_and_go_once(tmp_path: Path) -> None:
    watched = WatchedDirectory(tmp_path)
    assert watched.poll() == []
    first = tmp_path / "first.yaml"
    first.write_text("name: a")
    (tmp_path / ".hidden.yaml").write_text("being written")
    (tmp_path / "notes.txt").write_text("not a task")
    assert watched.poll() == [Submit(first)]
    assert watched.poll() == []
    first.write_text("name: another")
    assert watched.poll() == [Submit(first)], "a corrected file is looked at again"
    first.rename(tmp_path / "elsewhere.txt")
    assert watched.poll() == [Cancel(first)]


def test_stop_file(tmp_path: Path) -> None:
    watched = WatchedDirectory(tmp_path)
    (tmp_path / STOP).touch()
    assert watched.poll() == [Drain()]
    assert watched.poll() == [Drain()], "it holds as long as the file is there"


def test_a_directory_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    watched = WatchedDirectory(folder)
    (folder / "a.yaml").write_text("name: a")
    watched.poll()
    folder.rename(tmp_path / "away")
    assert watched.poll() == []
