"""What a task that has left held is free at once, not when Python's garbage collector comes by."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine
from megatron_mux.kernels.attention import short as short_attention
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.budget import Budget
from tests.unit.engine.test_trial import cases_of


def test_memory_of_a_task_that_left_is_free_at_once(tmp_path: Path) -> None:
    parallel = initialize(device="cpu")
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama"), parallel, torch.float32)
    engine = Engine(backbone, parallel)
    gc.collect()
    gc.disable()
    try:
        with Budget() as budget:
            before = budget.held
            engine.register_tasks([case.task for case in cases_of()])
            engine.step()
            assert budget.held > before
            for name in engine.tasks:
                engine.remove_task(name)
            for cached in (short_attention._classes, short_attention._bias):
                cached.cache_clear()  # masks of lengths, whosever they were
            assert budget.held < before + 1024, "but for a few numbers"
    finally:
        gc.enable()
