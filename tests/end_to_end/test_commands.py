"""A run that a program commands: tasks join, pause, go on and leave, and come out as if nobody had."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.end_to_end.forked import Server
from tests.end_to_end.outcome import assert_same_file, final_checkpoint, metrics
from tests.end_to_end.test_loop import python
from tests.end_to_end.workplace import TASKS, Workplace, furnish

# Trains from Python, and puts commands after so many bursts: `put` below says which. Each task has a bucket of its own:
# where tasks share products, who is there changes how they round (by 1e-7 here).
DRIVER = """
import json, os, pathlib, signal, sys, time
import megatron_mux
from megatron_mux.data.background import BackgroundTokenising
from megatron_mux.training.callback import Callback
from megatron_mux.training.commands import Cancel, CommandQueue, Drain, Pause, Resume, Submit

poll = BackgroundTokenising.poll

def wait(self):
    self._process.wait()  # a task joins before a certain step
    return poll(self)

BackgroundTokenising.poll = wait

class Director(Callback):
    def __init__(self):
        self.queue, self.bursts = CommandQueue(), 0
        self.queue.put(*put.get(0, ()))

    def state_changed(self, change):
        print("change", *change[:3])

    def after_steps(self, steps):
        self.bursts += 1
        self.queue.put(*put.get(self.bursts, ()))
        while self.bursts == kill_after and "paused" not in "".join(
            file.read_text() for file in pathlib.Path("run/manifests").glob("*.json")
        ):
            time.sleep(0.01)  # for the save of the step before
        if self.bursts == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

director = Director()
megatron_mux.train(
    backbone="backbone", tasks=tasks, save="run", load=load, save_interval=3, mux_rolling=False, mux_no_progress=True,
    mux_policy="temporal", commands=director.queue, callbacks=[director],
)
"""


def drive(
    server: Server, workplace: Workplace, put: str, *, load: bool = False, kill_after: int = 0
) -> list[str]:
    """The lines of a run that is told `put`: commands by the number of bursts before them."""
    settings = f"tasks, load, kill_after = 'tasks.yaml', {'run' if load else None!r}, {kill_after}\n"
    driver = DRIVER.replace("director = Director()", f"put = {put}\ndirector = Director()")
    words = f"import os\nos.chdir({str(workplace.root)!r})\n{settings}{driver}"
    run = python(server, "-c", words)
    assert run.returncode == (-signal.SIGKILL if kill_after else 0), run.stderr
    return run.stdout.splitlines()


def changes(lines: list[str], name: str) -> list[str]:
    """The states that a task went through."""
    told = [line.split()[2:] for line in lines if line.startswith(f"change {name} ")]
    assert [old for old, _ in told] == ["None", *(new for _, new in told[:-1])]
    return [new for _, new in told]


def saved(workplace: Workplace) -> list[dict[str, tuple[str, int]]]:
    """Status and step of each task in each save."""
    files = sorted((workplace.root / "run" / "manifests").iterdir())
    return [
        {task["name"]: (task["status"], task["step"]) for task in json.loads(file.read_text())["tasks"]}
        for file in files
    ]


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves whose tasks nobody pauses."""
    workplace = furnish(tmp_path_factory.mktemp("undisturbed"))
    drive(server, workplace, "{0: [Drain()]}")
    return workplace.root / "run"


def assert_as_undisturbed(workplace: Workplace, undisturbed: Path, task: str) -> None:
    """The same adapter, moments and figures, bit for bit."""
    ours, theirs = (final_checkpoint(run, task) for run in (workplace.root / "run", undisturbed))
    for name in ("adapter_model.safetensors", "training_state.safetensors"):
        assert_same_file(ours / name, theirs / name)
    assert metrics(workplace.root / "run", task) == metrics(undisturbed, task)


def test_tasks_pause_and_go_on_while_others_join_and_leave(
    server: Server, tmp_path: Path, undisturbed: Path
) -> None:
    workplace = furnish(tmp_path)
    joins = workplace.write_tasks("joins.yaml", {"joins": {**TASKS["prefix"], "data": TASKS["diff"]["data"]}})
    lines = drive(
        server,
        workplace,
        "{2: [Pause('lora'), Cancel('prefix'), Resume('diff'), Pause('nobody')],"
        f" 4: [Submit(pathlib.Path({str(joins)!r}))], 8: [Resume('lora')], 9: [Drain()]}}",
    )
    assert changes(lines, "lora") == ["loading", "running", "paused", "waiting", "running", "finished"]
    assert changes(lines, "prefix") == ["loading", "running", "removed"]
    assert changes(lines, "joins") == ["joining", "running", "finished"]
    assert "diff cannot be resumed: it is running, not paused" in lines
    assert "nobody cannot be paused: this run has no task of that name" in lines
    saves = saved(workplace)
    assert {save["lora"][1] for save in saves if save["lora"][0] == "paused"} == {2}
    assert saves[-1] == {
        "lora": ("finished", 14), "diff": ("finished", 12), "prefix": ("removed", 2), "joins": ("finished", 7),
    }  # fmt: skip
    for task in ("lora", "diff"):
        assert_as_undisturbed(workplace, undisturbed, task)


def test_a_paused_task_survives_a_kill_and_a_run_that_ends(
    server: Server, tmp_path: Path, undisturbed: Path
) -> None:
    workplace = furnish(tmp_path)
    drive(server, workplace, "{2: [Pause('lora')]}", kill_after=4)
    assert saved(workplace)[-1]["lora"] == ("paused", 2)
    lines = drive(server, workplace, "{0: [Drain()]}", load=True)
    assert "lora is paused, as it was when the run was saved" in lines
    assert changes(lines, "lora") == ["loading", "waiting", "paused", "stopped"]
    assert "stopped with lora paused: every task is saved: continue with --load run --save run" in lines
    statuses = {"lora": ("paused", 2), "diff": ("finished", 12), "prefix": ("finished", 7)}
    assert saved(workplace)[-1] == statuses
    lines = drive(server, workplace, "{0: [Resume('lora'), Drain()]}", load=True)
    assert changes(lines, "lora") == ["loading", "waiting", "paused", "waiting", "running", "finished"]
    assert saved(workplace)[-1] == {**statuses, "lora": ("finished", 14)}
    for task in TASKS:
        assert_as_undisturbed(workplace, undisturbed, task)
