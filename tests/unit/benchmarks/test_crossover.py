"""The crossover's table and plot: points of several results, what may be compared, where two curves meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def result(sequences: int, dtype: str = "bfloat16", **speedups: float) -> dict[str, Any]:
    """A result of `vs_peft.py` with these speed-ups; `zero_padded` stands for that rival."""
    named = {name.replace("_", "-"): speedup for name, speedup in speedups.items()}
    settings = {"backbone": "llama3-8b with 8 layers", "dtype": dtype, "liger": True, "device": "cuda"}
    return {
        "hardware": {"gpu": "a GPU", "cpu": "a CPU", "threads": 2},
        "versions": {"torch": "2"},
        "settings": {**settings, "lora": {"targets": ["q_proj"]}, "repeats": sequences},
        "mix": [{"sequences": sequences, "max_length": 64, "rank": rank} for rank in (8, 64)],
        "all": {
            "rivals": {name: {"speedup": speedup} for name, speedup in named.items()},
            "tokens_per_second": {"mux": 1000.0, **{name: 1000 / speedup for name, speedup in named.items()}},
            "step_over_ceiling": 1.1,
        },
    }


def write(directory: Path, *results: dict[str, Any]) -> list[str]:
    files = [directory / f"{i}.json" for i in range(len(results))]
    for file, one in zip(files, results, strict=True):
        file.write_text(json.dumps(one))
    return [str(file) for file in files]


def test_results_of_several_runs_make_one_table_and_one_plot(tmp_path: Path) -> None:
    import vs_peft_crossover

    runs = [result(8, packed=2.0), result(8, padded=3.0, zero_padded=1.6), result(2, packed=4.0, padded=5.0)]
    runs.append(result(32, packed=0.5))
    output = tmp_path / "crossover.json"
    assert vs_peft_crossover.main([*write(tmp_path, *runs), "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    points = [(point["rival"], point["sequences"], point["speedup"]) for point in found["points"]]
    assert points[:2] == [("padded", 2, 5.0), ("padded", 8, 3.0)]
    assert points[2:] == [
        ("packed", 2, 4.0),
        ("packed", 8, 2.0),
        ("packed", 32, 0.5),
        ("zero-padded", 8, 1.6),
    ]
    table = output.with_suffix(".md").read_text()
    assert "r=8/64" in table and "| 8 | 500 | 1000 | **2.00x** (goal 1.8x) | 1.100 (goal 1.18) |" in table
    assert "Faster than PEFT, packed without padding: up to about 16 sequences." in table
    assert table.count("at all of these points") == 2
    assert output.with_suffix(".svg").read_text().count("<!-- over ") == 3, "a curve of each in the legend"


def test_what_cannot_be_compared_is_refused_and_what_is_missing_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import vs_peft_crossover

    files = write(tmp_path, result(8, packed=2.0), result(2, "float32", packed=2.0))
    assert vs_peft_crossover.main(files) == 2
    assert "not of the same backbone" in capsys.readouterr().err
    uneven = result(8, packed=2.0)
    uneven["mix"][0]["sequences"] = 4
    assert vs_peft_crossover.main(write(tmp_path, uneven)) == 2
    assert "measure with --sequences" in capsys.readouterr().err
    assert vs_peft_crossover.main([str(tmp_path / "none.json")]) == 2
    assert "there is no result" in capsys.readouterr().err
    files = [*write(tmp_path, result(8, "float32", packed=2.0)), str(tmp_path / "none.json")]
    assert vs_peft_crossover.main(files) == 0
    said = capsys.readouterr()
    assert "left out" in said.err and "none.json" in said.err and "goal" not in said.out


def test_where_megatron_mux_is_faster() -> None:
    from vs_peft_crossover import crossings

    assert crossings([(2, 0.5), (8, 2.0)]) == {"from": pytest.approx(4.0)}
    assert crossings([(2, 2.0), (8, 0.5)]) == {"up to": pytest.approx(4.0)}
    assert not crossings([(2, 2.0), (8, 1.5)]) and not crossings([(2, 0.5), (8, 0.6)])


@pytest.mark.parametrize(
    ("points", "at"),
    [
        ([(2, 0.5), (8, 2.0)], 4.0),
        ([(2, 0.5), (4, 0.5), (8, 1.0)], 8.0),
        ([(2, 2.0), (8, 3.0)], None),
        ([(2, 0.5), (8, 0.9)], None),
        ([(2, 0.5)], None),
    ],
)
def test_where_a_ratio_rises_above_one(points: list[tuple[int, float]], at: float | None) -> None:
    from plot import crossing

    assert crossing(points) == (at if at is None else pytest.approx(at))
