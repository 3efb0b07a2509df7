"""What a task that has left held is free at once, not when Python's garbage collector comes by."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.budget import Budget
from tests.end_to_end.families import FAMILIES, diff_pruning, lora
from tests.end_to_end.harness import Case, random_records


def test_memory_of_a_task_that_left_is_free_at_once(tmp_path: Path) -> None:
    targets = FAMILIES["llama"]
    adapters = {
        "lora": lora(targets.query_value, r=4, lora_dropout=0.2),
        "pruned": diff_pruning(targets.query_value),
        "scales": {
            "peft_type": "IA3",
            "target_modules": ["k_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        },
        "bottle": {"peft_type": "BOTTLENECK", "bottleneck_size": 6, "target_modules": ["o_proj"]},
        "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5},
    }
    training = {"per_device_train_batch_size": 3, "max_steps": 4}
    cases = [Case(n, a, training, random_records(6, 96, 4, 12, seed=1)) for n, a in adapters.items()]
    parallel = initialize(device="cpu")
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama"), parallel, torch.float32)
    engine = Engine(backbone, parallel)
    gc.collect()
    gc.disable()
    try:
        with Budget() as budget:
            before = budget.held
            engine.register_tasks([case.task for case in cases])
            engine.step()
            assert budget.held > before
            for name in engine.tasks:
                engine.remove_task(name)
            assert budget.held < before + 1024, "but for a few numbers"
    finally:
        gc.enable()
