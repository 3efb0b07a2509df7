"""The configurations of a sweep, best first, for people and for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_mux.sweep.curves import draw
from megatron_mux.sweep.leaderboard import Row, best_lines, ranked, table, to_csv
from megatron_mux.sweep.texts import figure_texts, value_texts

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


def test_lists_are_json_in_the_results() -> None:
    rows = [
        Row("s", {"adapter.target_modules": own}, 0.5, 1, 1, "over") for own in (["q", "v"], "all-linear")
    ]
    lines = csv.DictReader(io.StringIO(to_csv({"s": rows}, "eval_loss")))
    assert [own["adapter.target_modules"] for own in lines] == ['["q", "v"]', "all-linear"]


def drawn(rows: list[Row], metric: str = "eval_loss") -> list[str]:
    """The lines of the table on a terminal of 80 columns."""
    console = Console(width=80, file=io.StringIO())
    console.print(table("s", rows, metric))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_table_fits_into_eighty_columns_however_many_there_are() -> None:
    def settings(i: int) -> dict[str, object]:
        return {
            "adapter.r": i,
            "training.learning_rate": 1e-4 * i,
            "adapter.target_modules": ["q_proj"] * (i % 3),
        }

    lines = drawn([Row(f"s-{i}", settings(i), float(i), 9, 9, "finished") for i in range(200)])
    assert max(map(len, lines)) <= 80 and len(lines) < 30
    assert lines[0] == "s: 200 configurations, best first"
    assert lines[1].split() == ["r", "lr", "modules", "eval_loss", "steps", "status"]
    assert lines[20].split() == ["19", "18", "0.0018", "18.000", "9", "finished"]
    assert "and 180 more in results.csv" in lines[-1]


def test_with_many_fields_figures_steps_and_status_stay_whole() -> None:
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings: dict[str, list[Any]] = {
        "adapter.r": [8, 16],
        "adapter.target_modules": [every, every[:2]],
        "adapter.lora_alpha": [16, 32],
        "training.learning_rate": [3e-4, 1e-3],
        "training.lr_scheduler_type": ["constant_with_warmup", "cosine"],
        "training.gradient_accumulation_steps": [1, 2],
        "data.path": ["/data/a/train.jsonl", "/data/b/train.jsonl"],
    }
    figures = (1.23451, 1.23452)
    rows = [
        Row(f"s-{i}", {key: own[i] for key, own in settings.items()}, figures[i], 900, 1000, "finished")
        for i in range(2)
    ]
    lines = drawn(rows)
    assert max(map(len, lines)) <= 80 and len(lines) == 4, "a line each"
    assert lines[1].split()[-3:] == ["eval_loss", "steps", "status"]
    assert [line.split()[-3:] for line in lines[2:]] == [
        ["1.23451", "1000", "finished"],
        ["1.23452", "1000", "finished"],
    ]


def test_without_evaluation_nothing_is_called_best() -> None:
    assert "best" not in drawn(ROWS, "loss")[0]


@pytest.mark.parametrize(
    ("key", "values", "texts"),
    [
        ("data.path", ["/d/a.jsonl", "/d/b.jsonl"], ["a", "b"]),
        ("data.path", ["/d/a.jsonl", "/d/a.parquet"], ["a.jsonl", "a.parquet"]),
        ("data.path", ["/d/x/a.jsonl", ["/d/y/a.jsonl"]], ["x/a.jsonl", "y/a.jsonl"]),
        ("adapter.target_modules", [["q", "v"], "all-linear"], ["q.v", "all-linear"]),
        ("adapter.target_modules", [["q_proj"] * 3, ["q_proj"]], ["q_proj+2", "q_proj"]),
        (
            "adapter.target_modules",
            [["q_proj", "k_proj", "v_proj"], ["q_proj", "o_proj", "v_proj"]],
            ["q_proj.k_proj.v_proj", "q_proj.o_proj.v_proj"],
        ),
    ],
)
def test_different_settings_look_different(key: str, values: list[Any], texts: list[str]) -> None:
    assert value_texts(key, values) == texts


@pytest.mark.parametrize(
    ("figures", "texts"),
    [
        ([1.5, 2.25, None], ["1.500", "2.250", "-"]),
        ([1.23451, 1.23452, 110.0], ["1.23451", "1.23452", "110.00000"]),
        ([1.0, 1.0 + 1e-9], ["1.000000", "1.000000"]),
        ([2.0, 2.0, 3e20, math.inf], ["2.000", "2.000", "3e+20", "inf"]),
    ],
)
def test_figures_have_as_many_decimals_as_tell_neighbours_apart(
    figures: list[float | None], texts: list[str]
) -> None:
    assert figure_texts(figures) == texts


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
    assert lines[1] == "import peft, transformers"
    exec(lines[2], {"peft": modules, "transformers": modules})
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


def test_a_configuration_that_diverges_leaves_the_picture_to_the_others(tmp_path: Path) -> None:
    rows = [Row(f"s-{i}", {"adapter.r": i}, 1.0, 9, 9, "finished") for i in range(4)]
    for row, worst in zip(rows, (3.0, 3.1, 3.2, 1e6), strict=True):
        (tmp_path / row.name).mkdir()
        lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": worst}, {"step": 3, "loss": math.inf}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / row.name / "metrics.jsonl").write_text(text)
    texts = {own.text or "" for own in ET.fromstring(draw(tmp_path, {"s": rows}, "eval_loss")).iter()}
    assert "1e6" not in texts, "ticks are multiples of it"
    assert any(text.startswith("3.") for text in texts)
