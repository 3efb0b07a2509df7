"""The benchmark of placed experts without its measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_without_namespaces_or_model_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import expert_placement

    assert expert_placement.main(["--upcycled", str(tmp_path), "--cases", "movie"]) == 2
    assert "examples/moe/upcycle.py" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))  # no `ip`
    assert expert_placement.main(["--cases", "zipf-0.8"]) == 2
    assert "network namespaces need root and iproute2" in capsys.readouterr().err


def test_routers_select_experts_as_zipfs_law_says() -> None:
    from expert_placement_models import EXPERTS, HIDDEN, TOP_K, _fit_router, entropy, zipf

    torch.manual_seed(0)
    x = torch.randn(1024, HIDDEN) + torch.randn(HIDDEN)
    for skew in (0.0, 1.2):
        weight, wanted = torch.empty(EXPERTS, HIDDEN), zipf(skew)
        assert float(wanted.sum()) == pytest.approx(TOP_K)
        _fit_router(weight, x, wanted)
        chosen = (x @ weight.T).topk(TOP_K, dim=1).indices
        found = torch.bincount(chosen.flatten(), minlength=EXPERTS).double() / len(x)
        assert (found - wanted).abs().max() < 0.03
        assert entropy(found) == pytest.approx(entropy(wanted), abs=0.01)


def test_bytes_on_a_ring() -> None:
    from expert_placement import _ring_bytes

    # Of six processes on three nodes, three pass on to another node, each ten sixths of what is summed.
    assert _ring_bytes(600, "aabbcc") == pytest.approx(3 * 1000)
    assert _ring_bytes(600, "aaa") == 0
