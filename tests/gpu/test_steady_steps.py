"""On a GPU: a steady step waits for nothing, and what was adapted to a CPU is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import step_runner
from megatron_mux.pipeline.execute import execute
from tests import tiny_models
from tests.end_to_end.harness import Case, random_records, train
from tests.gpu.needs_gpu import NEEDS_GPU
from tests.unit.engine.test_no_waits import ADAPTERS

pytestmark = NEEDS_GPU
DEVICE = "cuda"
STEPS = 6
UNSTEADY = 2
"""Steps that may wait: they load kernels, and make what later ones use again."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steady_steps_make_the_host_wait_for_nothing(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0

    def watched(*args: Any, **kwargs: Any) -> None:
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("error" if steps > UNSTEADY else "default")
        try:
            execute(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(step_runner, "execute", watched)
    training = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "max_steps": STEPS}
    cases = [
        Case(name, section, training, random_records(2, 90, 24, 24, seed=i))
        for i, (name, section) in enumerate(ADAPTERS.items())
    ]
    parallel = runtime.initialize(device=DEVICE)
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama"), parallel, dtype)
    trained = train(backbone, parallel, cases, STEPS)
    runtime.shutdown()
    assert steps == STEPS
    assert all(result.status != "failed" for results in trained.results.values() for result in results)


def test_a_wait_is_noticed() -> None:
    """Otherwise the test above could not fail."""
    x = torch.ones(3, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_after_a_run_on_the_cpu_torch_knows_its_gpu_again() -> None:
    before = torch.cuda.current_device
    runtime.initialize(device="cpu")
    assert str(torch.cuda.current_device()) == "cpu"
    runtime.shutdown()
    assert torch.cuda.current_device is before and torch.cuda.current_device() == 0
    parallel = runtime.initialize(device=DEVICE)
    assert parallel.device == torch.device("cuda", 0) and torch.cuda.current_device is before
    torch.cuda.synchronize()
    runtime.shutdown()
