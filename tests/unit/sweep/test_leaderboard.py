"""The configurations of a sweep, best first, for people and for programs."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_mux.sweep.curves import draw
from megatron_mux.sweep.leaderboard import Row, best_lines, ranked, table, to_csv

ROWS = [
    Row("s-r4", {"adapter.r": 4, "x.same": 1}, 2.5, 6, 6, "pruned", "3rd of 3", "s-r4/checkpoint-6"),
    Row("s-r8", {"adapter.r": 8, "x.same": 1}, 1.25, 18, 18, "finished", "", "s-r8/checkpoint-18"),
    Row("s-r16", {"adapter.r": 16, "x.same": 1}, None, 0, 0, "waiting"),
    Row("s-r32", {"adapter.r": 32, "x.same": 1}, 0.5, 6, 6, "failed"),
]


def test_the_best_comes_first_and_what_has_no_figure_last() -> None:
    assert [row.name for row in ranked(ROWS, False)] == ["s-r8", "s-r4", "s-r16", "s-r32"]
    assert [row.name for row in ranked(ROWS, True)] == ["s-r4", "s-r8", "s-r16", "s-r32"]


def test_results_are_a_line_each_with_what_differs() -> None:
    text = to_csv(
        {"s": ranked(ROWS, False), "t": [Row("t-1", {"data.path": "d"}, 0.5, 1, 1, "finished")]}, "eval_loss"
    )
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [(own["sweep"], own["rank"], own["task"]) for own in lines][:2] == [
        ("s", "1", "s-r8"),
        ("s", "2", "s-r4"),
    ]
    assert lines[0] | {"adapter.r": "8", "eval_loss": "1.25", "steps": "18"} == lines[0]
    assert lines[1]["reason"] == "3rd of 3" and lines[2]["eval_loss"] == "" and lines[4]["data.path"] == "d"
    assert "x.same" not in lines[0]


def test_the_table_fits_into_eighty_columns_however_many_there_are() -> None:
    def settings(i: int) -> dict[str, object]:
        return {
            "adapter.r": i,
            "training.learning_rate": 1e-4 * i,
            "adapter.target_modules": ["q_proj"] * (i % 3),
        }

    many = [Row(f"s-{i}", settings(i), float(i), 9, 9, "finished") for i in range(200)]
    console = Console(width=80, file=io.StringIO())
    console.print(table("s", many, "eval_loss"))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 30
    assert "and 180 more in results.csv" in lines[-1] and "learning_rate" in lines[1]
    assert lines[0] == "s: 200 configurations, best first"


def test_the_best_is_named_with_the_code_that_loads_it(tmp_path: Path) -> None:
    lines = list(best_lines(ROWS[1], "eval_loss", Path("runs/s"), "org/model"))
    assert lines[0] == "best: s-r8 (eval_loss 1.25 after 18 steps)"
    loaded: list[str] = []

    class Auto:
        @staticmethod
        def from_pretrained(*names: object) -> str:
            loaded.extend(map(str, names))
            return "model"

    modules = type("m", (), {"PeftModel": Auto, "AutoModelForCausalLM": Auto})
    exec(lines[1], {"peft": modules, "transformers": modules})
    assert loaded == ["org/model", "model", "runs/s/s-r8/checkpoint-18"]
    assert not list(best_lines(ROWS[2], "eval_loss", tmp_path, "m"))


def test_curves_are_of_every_configuration_and_mark_who_stopped(tmp_path: Path) -> None:
    for row in ROWS[:2]:
        (tmp_path / row.name).mkdir()
        lines: list[Any] = [
            {"step": 0, "eval_loss": 3.0},
            *({"step": s, "loss": 2.0 / s} for s in range(1, row.steps + 1)),
        ]
        lines.append({"step": row.steps, "eval_loss": row.value})
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "lo'
        (tmp_path / row.name / "metrics.jsonl").write_text(text)
    picture = draw(tmp_path, {"s": ranked(ROWS, False)}, "eval_loss")
    root = ET.fromstring(picture)
    words = {own.text for own in root.iter() if own.text and own.tag.endswith("text")}
    assert {"s-r8", "s-r4", "eval_loss", "loss", "step", "best first"} <= words
    assert picture == draw(tmp_path, {"s": ranked(ROWS, False)}, "eval_loss"), (
        "the same figures, the same file"
    )
