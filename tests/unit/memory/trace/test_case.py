"""From flags and task files to the case that is traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_mux.errors import UserError
from megatron_mux.memory.tensors import ModelTensors
from megatron_mux.memory.trace.case import Case, Options, of_task

TENSORS = ModelTensors(
    "llama", (), "e", "h", 40, 64, 4, 100, None, {}, {"layer_types": ["a", "b"] * 20}, (0, 1) * 20
)


def _case(**options: Any) -> Case:
    return Options(**options).case({"model_type": "llama"}, TENSORS, 128, 3)


def test_what_the_model_says_is_in_the_case() -> None:
    found = _case()
    assert (found.layers, found.length, found.batch) == (40, 128, 3)
    assert found.kinds == (0, 1) * 20 and found.config["layer_types"] == ["a", "b"] * 20


@pytest.mark.parametrize(
    ("options", "weights", "autocast"),
    [
        ({}, "float32", "bfloat16"),
        ({"precision": "fp16"}, "float32", "float16"),
        ({"master_weights": False}, "bfloat16", None),
        ({"precision": "fp32"}, "float32", None),
        ({"adapter": {"peft_type": "LORA"}}, "bfloat16", None),  # a frozen backbone
    ],
)
def test_precisions(options: dict[str, Any], weights: str, autocast: str | None) -> None:
    found = _case(**options)
    assert (found.weights, found.autocast) == (weights, autocast)


def test_the_rest() -> None:
    plain, other = (
        _case(),
        _case(optimizer="sgd", attention="eager", recompute=True, accumulate=True, clip=None),
    )
    # What Trainer's default comes to.
    assert (plain.optimizer, plain.attention, plain.recompute, plain.clip) == (
        "adamw_torch_fused",
        "sdpa",
        False,
        1.0,
    )
    assert _case(optimizer="adamw_torch").optimizer == "adamw_torch"
    assert (other.optimizer, other.attention, other.recompute, other.clip) == ("sgd", "eager", True, None)
    assert other.accumulate and not plain.accumulate


def test_what_a_gpu_does_not_do() -> None:
    with pytest.raises(UserError, match="--device H9000: is not known"):
        _case(device="H9000")
    with pytest.raises(UserError, match="--device V100: has no bf16"):
        _case(device="V100")
    assert _case(device="V100", precision="fp16").gpu.capability == (7, 0)


TASK = """
name: a
adapter: {peft_type: LORA, r: 4, target_modules: [q_proj]}
data: {path: missing.jsonl, max_length: 96}
training: {max_steps: 1, per_device_train_batch_size: 5, gradient_accumulation_steps: 2, optim: sgd, max_grad_norm: 0.5}
"""


def test_a_task(tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(TASK)
    options, batch, length = of_task(file, Options(precision="fp16", recompute=True))
    assert (batch, length) == (5, 96)
    adapter = dict(options.adapter or {})
    assert (adapter["peft_type"], adapter["r"], adapter["target_modules"]) == ("LORA", 4, ["q_proj"])
    assert (options.optimizer, options.accumulate, options.clip) == ("sgd", True, 0.5)
    assert options.precision == "fp16" and options.recompute
    file.write_text(
        TASK.replace("LORA, r: 4, target_modules: [q_proj]", "BOTTLENECK").replace("1, optim: sgd", "1")
    )
    with pytest.raises(UserError, match="task 'a': peft has no BOTTLENECK to trace"):
        of_task(file, Options())
