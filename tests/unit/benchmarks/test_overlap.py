"""The overlap benchmark without its measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_without_namespaces_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import overlap

    monkeypatch.setenv("PATH", str(tmp_path))  # no `ip`
    assert overlap.main([]) == 2
    assert "network namespaces need root and iproute2" in capsys.readouterr().err


def test_bound_and_speed_up() -> None:
    from overlap_sides import figures

    seconds = {"a": [3.0, 3.3], "b": [3.0, 3.0], "c": [2.5, 2.5], "d": [2.5, 2.2], "e": [2.4, 2.2]}
    seconds |= {"f": [2.0, 2.0], "g": [1.0, 1.0]}
    cpu = {side: [[1.0, 1.5], [1.0, 1.5]] for side in seconds} | {"g": [[0.1, 0.2], [0.2, 0.1]]}
    found: dict[str, Any] = figures(seconds, cpu, 0.5, {"a": 3.0, "d": 2.2, "e": 2.3})
    assert found["share_of_messages"] == pytest.approx(1 / 3)
    assert found["bound"] == pytest.approx(3 / 2.2)
    assert found["bound_with_kernel"] == pytest.approx(3 / 2.5)
    assert found["speed_up"]["e"] == pytest.approx((3.0 / 2.4 + 3.3 / 2.2) / 2)
    assert found["median_cpu_s"]["f"] == 1.5
    assert found["predicted_fastest"] == "d"
    assert found["predicted_fastest_over_best"] == pytest.approx(
        found["speed_up"]["d"] / found["speed_up"]["e"]
    )


def test_prediction_follows_the_launch_order() -> None:
    from overlap_sides import ChainTimes, MessageCosts, PlanTimes
    from tensor_messages import TimedPass, TimedPiece

    sent = (4, "fp32")
    pieces = [TimedPiece(i, t, t + 1.0, sent if t < 4 else None) for t, i in enumerate((0, 1, 0, 1, 0, 1))]
    profile: Any = PlanTimes(13.0, [sent] * 8, [(TimedPass(pieces), TimedPass(pieces))])
    costs: Any = MessageCosts({sent: 1.0}, {sent: 1.0})
    turns = ChainTimes.of(profile, costs, lambda values: values)
    assert turns.rest == pytest.approx(1.0)  # 13 seconds, of which twice six are pieces
    one_after_another, in_turn = [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]
    assert turns.predicted((one_after_another, one_after_another)) == pytest.approx(1.0 + 2 * 10.0)
    assert turns.predicted((in_turn, in_turn)) == pytest.approx(1.0 + 2 * 6.0)
