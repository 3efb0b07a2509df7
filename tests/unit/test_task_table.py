"""The table of tasks: what it shows at each width, what it costs, and the capture of it in the docs."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

import pytest
from rich.console import Console

from megatron_mux.engine import EvalResult
from megatron_mux.task_table import TaskTable
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.life import TaskLife

ROOT = Path(__file__).resolve().parents[2]
TASKS = {
    "movie-sentiment": (8, 2e-3),
    "dialogue": (16, 1e-3),
    "glosses": (32, 1e-3),
    "austen": (8, 2e-4),
    "support-tickets": (16, 5e-4),
    "summaries": (64, 1e-4),
}
WIDTHS = (80, 90, 100, 140)


def spec_of(name: str, rank: int = 8, rate: float = 1e-3, **training: object) -> TaskSpec:
    fields = {"max_steps": 40, "learning_rate": rate, **training}
    adapter = {"peft_type": "LORA", "r": rank}
    return TaskSpec.model_validate(
        {"name": name, "adapter": adapter, "data": {"path": "d"}, "training": fields}
    )


SPECS = [spec_of(name, *settings) for name, settings in TASKS.items()]


class Run:
    """Six tasks with evaluation, the last of which joins; a second passes for each step of the engine."""

    def __init__(self) -> None:
        self.now = 0.0
        self.table = TaskTable(lambda: self.now)

    def load(self, count: int = 5) -> None:
        for spec in SPECS[:count]:
            self.table.add(spec, TaskLife("loading"))
        self.now += 21

    def train(self, steps: int, first: int = 0, count: int = 5) -> None:
        for spec in SPECS[:count]:
            self.table.add(spec, TaskLife("running"), first, 40)
        for _ in range(steps):
            self.now += 2
            for number, spec in enumerate(SPECS[:count]):
                task = self.table.tasks[spec.name]
                task.step += 1
                task.loss = (3.4 + number / 10) * 0.98**task.step
                task.first_loss = task.first_loss or task.loss
                self.table.count(spec.name, 320, 1.6)
                loss, accuracy = 3.1 * 0.99**task.step, 0.5 + task.step / 100
                task.after = EvalResult({"loss": loss, "accuracy": accuracy}, 100)
                task.before = task.before or EvalResult({"loss": 3.1, "accuracy": 0.5}, 100)

    def join(self) -> None:
        self.table.add(SPECS[5], TaskLife("joining"))

    def drawn(self, width: int) -> list[str]:
        console = Console(width=width, record=True, file=io.StringIO(), soft_wrap=True)
        console.print(self.table)
        return console.export_text().splitlines()


def states() -> dict[str, Run]:
    """The moments of a run that people look at, each in a run of its own."""
    runs = {
        name: Run() for name in ("loading", "training", "joining", "joined", "resumed", "finished before")
    }
    for name, run in runs.items():
        run.load()
        if name in ("training", "joining", "joined"):
            run.train(12)
        if name in ("joining", "joined"):
            run.join()
        if name == "joined":
            run.train(3, first=12, count=6)
        if name == "resumed":
            run.table.add(SPECS[5], TaskLife("loading"))
            run.train(2, first=15, count=6)
        if name == "finished before":  # in the run that is continued; the file's order stays
            run.table.add(SPECS[3], TaskLife("finished"), 40, 40)
            run.table.add(SPECS[1], TaskLife("finished"), 40, 40)
    return runs


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("state", states())
def test_names_and_settings_are_whole_at_any_width(width: int, state: str) -> None:
    summary, headings, *rows = states()[state].drawn(width)
    assert all(len(line) <= width for line in (summary, headings, *rows)), rows
    assert [row.split()[0] for row in rows] == list(TASKS)[: len(rows)] and len(rows) >= 5
    assert {"task", "r", "lr", "status"} <= set(headings.split())
    for row in rows:
        name = row.split()[0]
        rank, rate = TASKS[name]
        assert row.split()[1:3] == [str(rank), f"{rate:g}"] or row.split()[2:4] == [str(rank), f"{rate:g}"]
    if state in ("training", "joined", "resumed"):
        assert {"step", "loss", "eval", "accuracy"} <= set(headings.split())
        assert " remaining 0:" in summary and summary.startswith("elapsed 0:00:")
    if state == "loading":
        assert all(row.endswith("loading") for row in rows) and "step" not in headings
    if state == "joining":
        assert rows[-1].startswith("summaries") and rows[-1].endswith("joining (tokenising)")
        assert "1 joining" in summary


def test_columns_give_way_in_an_order() -> None:
    run = states()["joining"]
    run.table.add(spec_of("with-decay", weight_decay=0.1, gradient_accumulation_steps=4), TaskLife("waiting"))

    def headings(width: int) -> list[str]:
        return re.split(" {2,}", run.drawn(width)[1].strip())

    widest = headings(200)
    assert widest[:4] == ["task", "adapter", "r", "lr"]
    assert {"weight_decay", "gradient_accumulation_steps"} <= set(widest), "every setting that differs"
    for narrow, wide in itertools.pairwise(map(headings, range(40, 200, 5))):
        assert set(narrow) <= set(wide)
    assert " -> " in run.drawn(200)[2] and " -> " not in run.drawn(90)[2]
    assert "adapter" in headings(140) and "weight_decay" not in headings(140), "other settings go first"
    assert headings(80)[:3] == ["task", "r", "lr"]
    assert headings(40) == ["task", "status"] and run.drawn(40)[2].startswith("movie-sentiment  ")
    assert run.drawn(30)[2].startswith("movie-s…  running"), "names are cut last"


def test_time_left_and_tokens_per_second_are_of_the_last_minutes() -> None:
    run = Run()
    run.load()
    run.train(10)
    # 5 tasks, 320 tokens in 2 seconds each, with 30 steps left.
    assert run.drawn(80)[0] == "elapsed 0:00:41, remaining 0:01:00, 800 tokens/s; 5 running"
    for spec in SPECS[:5]:
        run.table.tasks[spec.name].life.to("finished")
    run.now += 3600  # waiting for somebody to join
    run.table.add(SPECS[5], TaskLife("running"), 0, 40)
    run.now += 2
    run.table.count("summaries", 320, 2.0)
    run.table.tasks["summaries"].step += 1
    assert run.drawn(80)[0].startswith("elapsed 1:00:43, remaining 0:01:18, 160 tokens/s; ")


def test_a_pause_of_all_tasks_counts_neither_as_time_left_nor_against_their_speed() -> None:
    run = Run()
    run.load()
    run.train(10)
    for spec in SPECS[:5]:
        run.table.tasks[spec.name].life.to("paused")
    assert run.drawn(80)[0].endswith("0:00:41, 800 tokens/s; 5 paused")
    assert all(row.endswith("paused") for row in run.drawn(120)[2:])
    run.now += 3600
    spec = SPECS[0]
    life = run.table.tasks[spec.name].life
    life.to("running")
    run.table.add(spec, life, 10, 40)
    run.now += 2
    run.table.count(spec.name, 320, 2.0)
    assert "160 tokens/s; 1 running, 4 paused" in run.drawn(80)[0]


def test_a_terminal_shows_no_more_rows_than_it_has_lines() -> None:
    table = TaskTable()
    for number in range(500):
        table.add(spec_of(f"task-{number}"), TaskLife("finished" if number < 3 else "running"), 0, 40)
    console = Console(width=80, height=20, force_terminal=True, record=True, file=io.StringIO())
    console.print(table)
    lines = console.export_text().splitlines()
    assert (
        len(lines) < 20
        and lines[2].startswith("task-3 ")
        and "and 484 more: 3 finished, 481 running" in lines
    )
    table.is_final = True
    console.print(table)
    assert len(console.export_text().splitlines()) > 500


def test_what_trains_comes_before_what_a_scheduler_stopped() -> None:
    table = TaskTable()
    for number in range(100):
        table.add(spec_of(f"task-{number}"), TaskLife("pruned" if number < 60 else "running"), 0, 40)
    console = Console(width=80, height=20, force_terminal=True, record=True, file=io.StringIO())
    console.print(table)
    lines = console.export_text().splitlines()
    assert lines[2].startswith("task-60 ") and "and 84 more: 60 pruned, 24 running" in lines


def test_lists_and_data_of_a_sweep_have_columns() -> None:
    table = TaskTable()
    swept = {
        "a": {"adapter.r": 4, "adapter.target_modules": ["q_proj", "v_proj"], "data.path": "/d/one.jsonl"},
        "b": {"adapter.r": 8, "adapter.target_modules": "all-linear", "data.path": "/d/two.jsonl"},
    }
    for name, settings in swept.items():
        spec = spec_of(name, settings["adapter.r"])  # type: ignore[arg-type]
        adapter = spec.adapter.model_copy(update={"target_modules": settings["adapter.target_modules"]})
        table.add(spec.model_copy(update={"adapter": adapter}), TaskLife("running"), 0, 40)
        table.swept[name] = settings
    table.add(spec_of("c"), TaskLife("running"), 0, 40)
    console = Console(width=140, record=True, file=io.StringIO(), soft_wrap=True)
    console.print(table)
    found = [re.split(" {2,}", line.strip()) for line in console.export_text().splitlines()[1:]]
    assert found[0][:5] == ["task", "adapter", "r", "modules", "data"]
    assert [own[2:5] for own in found[1:]] == [
        ["4", "q_proj.v_proj", "one"],
        ["8", "all-linear", "two"],
        ["8", "-", "-"],
    ]


def test_the_capture_in_the_docs_is_what_is_drawn() -> None:
    """Prints what docs/running.md has to hold, if it does not."""
    capture = "\n".join(states()["joining"].drawn(100))
    assert f"```text\n{capture}\n```" in (ROOT / "docs" / "running.md").read_text(), capture
