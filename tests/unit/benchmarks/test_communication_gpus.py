"""The benchmark of messages on several GPUs without its measurement."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import communication_gpus

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert communication_gpus.main([]) == 2
    assert "2 tensor ranks need 2 GPUs, here are 1" in capsys.readouterr().err


def test_shares_of_a_step() -> None:
    from communication_worker import SLICES, intervals, shares

    def event(name: str, start: float, end: float, on_gpu: bool = True) -> SimpleNamespace:
        kind = SimpleNamespace(name="CUDA" if on_gpu else "CPU")
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=kind)

    events = [
        event("gemm", 0, 40),
        event("gemm", 20, 60),  # on another stream
        event("ncclDevKernel_AllReduce", 50, 80),
        event("multimem_all_reduce_kernel", 90, 100),
        event("aten::mm", 0, 100, on_gpu=False),
    ]
    found = shares(*intervals(events, on_gpu=True))
    assert [found[kind] for kind in ("compute", "links", "both")] == pytest.approx([0.6, 0.4, 0.1], abs=1e-3)
    assert found["slices"]["links"][: SLICES // 2] == [0.0] * (SLICES // 2)
    assert found["slices"]["both"][SLICES // 2] == 1.0
