"""The benchmark of split fine-tuning without its measurement: figures, tables and the memory part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def lines(count: int, step_s: float, waited_s: float, first: float = 0.0) -> list[dict[str, Any]]:
    """What a client writes whose steps all take as long."""
    return [
        {
            "ended": first + i * step_s,
            "cpu_s": 0.01 * i,
            "requests_s": 0.9 * step_s * i,
            "waited_s": waited_s * i,
            "computed_s": 0.1 * i,
            "waits": [waited_s / 2] * 2,
        }
        for i in range(count)
    ]


def test_parts_of_a_step_add_up() -> None:
    from split_cases import case_figures

    found = case_figures([lines(9, 2.0, 0.5), lines(5, 4.0, 0.5)], began=0.0, ended=100.0)
    assert found["is_whole"] and found["steps"] == [8, 4]
    parts = ("communication_s", "computation_s", "scheduling_s", "client_s")
    assert sum(found[key] for key in parts) == pytest.approx(found["step_s"])
    assert found["scheduling_s"] == pytest.approx(0.5)
    assert found["computation_s"] == pytest.approx(0.1)
    assert found["jain"] == pytest.approx(0.75**2 / (2 * (0.5**2 + 0.25**2)))
    assert found["p99_wait_s"] == 0.25


def test_too_few_steps_are_taken_from_throughput() -> None:
    from split_cases import case_figures

    clients = [lines(2, 10.0, 1.0, first=5.0 * i - 20.0) for i in range(4)]  # they end at -10, -5, 0 and 5
    found = case_figures([*clients[:2], *(own + lines(2, 3.0, 2.0, 7.5) for own in clients[2:])], -1.0, 20.0)
    assert not found["is_whole"] and found["jain"] is None
    assert found["step_s"] == pytest.approx(4 * 10.5 / 5)


def case(policy: str, clients: int, step_s: float, scheduling_s: float) -> dict[str, Any]:
    return {
        "policy": policy,
        "clients": clients,
        "ranks": 1,
        "step_s": step_s,
        "communication_s": 1.4,
        "computation_s": 0.1,
        "scheduling_s": scheduling_s,
        "client_s": 0.02,
        "p99_wait_s": 0.3,
        "jain": 0.99 if policy != "vanilla" else None,
        "is_whole": policy != "vanilla",
        "most_reserved": 8 << 20,
        "capacity": 16 << 20,
    }


def result() -> dict[str, Any]:
    memory = [
        {"clients": i, "persistent": 100 + i, "resident": 120, "measured": 120 + i, "equation_3": 121}
        for i in range(1, 5)
    ]
    memory = [{**own, "predicted": 130} for own in memory]
    copies = [{**own, "persistent": 101 * own["clients"]} for own in memory]
    sizes = [{"rows": rows, "rows_per_s": {"alone": [10.0], "together": [x * 10]}, "speed_up": x}
             for rows, x in ((64, 1.5), (256, 0.9))]  # fmt: skip
    return {
        "hardware": "a machine",
        "minutes": 1.0,
        "setup": {"bandwidth": 4e5, "layers": 5, "hidden": 384, "rows": 96, "steps": 6, "most_s": 30.0, "reason": "so.",
                  "swap_rate": 1e6, "copy_s": 6.0, "copy_steps": 3.77},
        "cases": [case("on-demand", 1, 1.6, 0.01), case("on-demand", 4, 1.7, 0.02), case("on-demand", 16, 2.1, 0.4),
                  case("preserve", 16, 13.0, 11.0), case("vanilla", 16, 200.0, 190.0)],
        "ranks": [case("on-demand", 4, 1.7, 0.02)],
        "together": {"clients": 8, "most_together": 1024, "backbone": "backbone", "sizes": sizes},
        "memory": {"rows": 64, "shared": memory, "vanilla": copies},
    }  # fmt: skip


def test_tables_and_goals(tmp_path: Path) -> None:
    from split_tables import draw, goals, markdown

    made = markdown(result())
    assert "| vanilla |  |  | 200.000* |" in made
    assert "| on-demand | 1.600 | 1.700 | 2.100 |" in made
    assert "| 1 | 4 | 1.700 | 1.400 | 0.100 | 0.020 |" in made
    assert "| preserve |  |  | 8.0 of 16.0 |" in made
    found = {goal: (measured, reached) for goal, measured, reached in goals(result())}
    assert found["a step grows <= 1.3x from 1 to 4 clients (on-demand)"] == ("1.06x", "reached")
    assert found["waiting at 16 clients >= 5x below preserve's (on-demand)"] == ("27.5x", "reached")
    assert found["co-batching never < 0.97x"] == ("0.90x", "MISSED")
    assert found["persistent memory of 4 clients >= 70% below vanilla's"] == ("74.3%", "reached")
    draw(result(), tmp_path / "split.json")
    assert (tmp_path / "split.svg").is_file()


def test_memory_of_shared_parameters_and_copies(tmp_path: Path) -> None:
    from split_memory import grow

    backbone = tiny_models.make(tmp_path, "llama")
    shared, copies = (grow(backbone, 2, own, rows=16, longest=8) for own in (False, True))
    for one, other in zip(shared, copies, strict=True):
        assert one["weights"] * one["clients"] == other["weights"]
        assert one["lasting"] == other["lasting"]
        assert one["equation_3"] == pytest.approx(one["measured"], rel=0.1)
    grown = shared[1]["persistent"] - shared[0]["persistent"]
    assert grown == pytest.approx(shared[1]["lasting"] - shared[0]["lasting"], rel=0.05)
    assert copies[1]["persistent"] > 2 * shared[0]["weights"]


def test_limit_lies_between_one_task_and_two() -> None:
    from split_model import Sizes, memory_limit

    from megatron_mux.split.server.session_memory import Memory

    sizes = Sizes(1000, Memory(rows=8, forward=20, graph=80, backward=100, hidden=5, lasting=10))
    limit, reason = memory_limit(sizes, 4)
    assert sizes.whole_task < limit < 2 * sizes.whole_task
    assert "halfway" in reason
    with pytest.raises(ValueError, match="100 clients' adapters leave"):
        memory_limit(sizes, 100)


def test_without_namespaces_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import split

    monkeypatch.setenv("PATH", str(tmp_path))  # no `ip`
    assert split.main(["--parts", "steps"]) == 2
    assert "network namespaces need root and iproute2" in capsys.readouterr().err
