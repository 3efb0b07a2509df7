"""Optimizer steps are priced by the operators that the engine runs."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine
from megatron_mux.engine.updates import LoopUpdate
from megatron_mux.fusion.device import device_of
from megatron_mux.fusion.profiler import updates
from megatron_mux.fusion.profiler.updates import estimated_updates, measured_updates, sample_step
from megatron_mux.optimizers.optimizer import FlatOptimizer, Optimizer
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.end_to_end.families import FAMILIES, lora
from tests.end_to_end.harness import Case, random_records

INSTALLED = [
    kind
    for kind in dict.fromkeys(OPTIMIZERS.values())
    if not kind.needs or importlib.util.find_spec(kind.needs) is not None
]
CPU = torch.device("cpu")


class Operators(TorchDispatchMode):
    """Counts operators, but those on single numbers: their tensors have at least so many values."""

    def __init__(self, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self._least = least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a])]
        sizes = [t.numel() for t in tensors if isinstance(t, torch.Tensor)]
        if max(sizes, default=0) >= self._least and not func.is_view:
            self.found[func.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", INSTALLED, ids=lambda kind: kind.__name__)
def test_what_is_measured_is_what_the_engine_runs(kind: type[Optimizer], tmp_path: Path) -> None:
    parallel = initialize(device="cpu")
    engine = Engine(Backbone.load(tiny_models.make(tmp_path, "llama"), parallel), parallel)
    training = {"optim": kind.names[0], "learning_rate": 1e-2, "max_steps": 3}
    case = Case(
        "one", lora(FAMILIES["llama"].query_value, r=2), training, random_records(4, 96, 4, 8, seed=0)
    )
    engine.register_tasks([case.task])
    optimizer = engine.optimizer("one")
    update = LoopUpdate([optimizer])
    with Operators(optimizer.flat_params.values.numel()) as ours, torch.no_grad():
        update.update([0], 0, update.squared_norms().sqrt(), torch.zeros(1, dtype=torch.bool))
    engine.close()
    step = sample_step(kind, 1, 1, 4096, CPU, torch.float32)
    with Operators(4096) as theirs, torch.no_grad():
        step()
    if issubclass(kind, FlatOptimizer):  # others step parameters of each shape apart
        assert theirs.found == ours.found
    around = {"mul_.Tensor", "zero_.default", "_foreach_norm.Scalar"}
    assert around <= set(theirs.found) and around <= set(ours.found)


def test_every_optimizer_has_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sample(kind: object, tensors: int, runs: int, size: int, *_: object) -> Callable[[], None]:
        def step() -> None:
            now[0] += 8 + 4 * runs + 2 * tensors + 1e-6 * tensors * size

        return step

    assert set(measured_updates(CPU, torch.float32, 1, lambda: None)) == {k.names[0] for k in INSTALLED}
    monkeypatch.setattr(updates, "sample_step", sample)
    monkeypatch.setattr(updates, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for price in measured_updates(CPU, torch.float32, 1, lambda: None).values():
        assert (price.task, price.run, price.tensor, price.value) == pytest.approx((8, 4, 2, 1e-6))
    of_a_gpu = estimated_updates(device_of("cuda", "H100", 0), on_gpu=True)
    assert set(of_a_gpu) == {kind.names[0] for kind in OPTIMIZERS.values()}
    assert of_a_gpu["adamw_torch_fused"].together and not of_a_gpu["lion_32bit"].together
    assert of_a_gpu["adamw_torch_fused"].task < of_a_gpu["lion_32bit"].task
