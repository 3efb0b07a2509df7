"""Architectures as numbers: no model is built for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.adapters.lora import LoraSpec
from megatron_mux.memory.forms.architecture import Architecture, ParamCounts
from megatron_mux.memory.forms.phases import StepMemory
from megatron_mux.memory.forms.task_adapters import AdaptedOp, TaskAdapters, TrainedTensor


def at_stage(memory: StepMemory, stage: int, rows: int) -> Mapping[str, int]:
    """Bytes of each part at a stage's peak."""
    own = (phase.breakdown for phase in memory.phases(rows) if phase.stage == stage)
    return max(own, key=lambda parts: sum(parts.values()))


def llama(layers: int = 3, hidden: int = 256, ffn: int = 704, kv_heads: int = 4, **more: Any) -> Architecture:
    """A small Llama of eight heads."""
    width = hidden // 8
    products = hidden * (2 * hidden + 2 * kv_heads * width) + 3 * hidden * ffn
    sizes: dict[str, Any] = {
        "model_type": "llama",
        "hidden": hidden,
        "heads": 8,
        "kv_heads": kv_heads,
        "head_dim": width,
        "ffn": ffn,
        "gated": True,
        "rotary": True,
        "experts": 1,
        "experts_per_token": 1,
        "vocabulary": 1024,
        "tied": False,
        "layers": (ParamCounts(products, 2 * hidden),) * layers,
        "embedding": ParamCounts(1024 * hidden),
        "head": ParamCounts(1024 * hidden),
        "final": ParamCounts(0, hidden),
    }
    return Architecture(**{**sizes, **more})


def gpt2(layers: int = 3, hidden: int = 256) -> Architecture:
    """A small GPT-2 of eight heads."""
    return Architecture(
        "gpt2", hidden, 8, 8, hidden // 8, 4 * hidden, False, 1, 1, 1024, True,
        (ParamCounts(12 * hidden * hidden + 7 * hidden, 6 * hidden),) * layers,
        ParamCounts(1024 * hidden, 1024 * hidden), ParamCounts(), ParamCounts(0, 2 * hidden),
    )  # fmt: skip


def lora(architecture: Architecture, rank: int = 8, name: str = "lora") -> TaskAdapters:
    """LoRA on queries and values of every layer."""
    a, count = architecture, len(architecture.layers)
    spec = LoraSpec(peft_type="LORA", r=rank)
    tensors = [
        TrainedTensor((layer,), tuple(size), dim)
        for layer in range(count)
        for size, dim in (
            ((rank, a.hidden), None), ((a.queries, rank), 0), ((rank, a.hidden), None), ((a.keys, rank), 0)
        )
    ]  # fmt: skip
    return TaskAdapters(
        name,
        "adamw_torch",
        tuple(AdaptedOp(layer, "linear_qkv", spec.curve(2)) for layer in range(count)),
        count,
        sequences=1,
        length=128,
        tensors=tuple(tensors),
    )


def quantised(whole: Architecture) -> Architecture:
    """The same whose layers' matrices are held in a quarter of bf16's bytes."""
    layers = tuple(
        replace(
            part, quantised=ParamCounts(divided=part.divided), held=ParamCounts(divided=part.divided // 2)
        )
        for part in whole.layers
    )
    return replace(whole, layers=layers)
