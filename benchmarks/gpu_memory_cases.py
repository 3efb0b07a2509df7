"""The cases of `gpu_memory.py`: models, and ways to fine-tune them. No constant of ours was fitted to any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megatron_mux.dry_run.run_spec import RunSpec, TaskRecords
from megatron_mux.fusion.plan import plan_for
from megatron_mux.gpus import Gpu
from megatron_mux.memory.trace.case import Case

LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "llama-1b": LLAMA_1B,
    "llama-8b": LLAMA_8B,
    "qwen2-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "gpt2-xl": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        # Dropout stays on, since its masks take memory.
    },
    "opt-1.3b": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 2048,
        "word_embed_proj_dim": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
}
"""Sizes of published models: Llama 3.2 1B, Llama 3 8B, Qwen2 1.5B, GPT-2 XL, OPT 1.3B."""
LAYERS = {"llama-1b": 16, "llama-8b": 32, "qwen2-1.5b": 28, "gpt2-xl": 48, "opt-1.3b": 24}

_QV = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
_ALL = {
    "peft_type": "LORA",
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.1,
    "target_modules": "all-linear",
}
_GPT2 = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["c_attn"], "fan_in_fan_out": True}
_IA3 = {
    "peft_type": "IA3",
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
_PREFIX = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 30}


def cases(gpu: Gpu) -> dict[str, tuple[str, Case]]:
    """Cases of training with `transformers` and `peft`, by name; each with the name of its model."""
    found: dict[str, tuple[str, Case]] = {}

    def add(name: str, model: str, batch: int, length: int, **more: Any) -> None:
        found[f"{model} {name}"] = model, Case(MODELS[model], LAYERS[model], batch, length, gpu=gpu, **more)

    fp32 = {"weights": "float32"}
    add("full", "llama-1b", 1, 1024)
    add("full, long", "llama-1b", 2, 4096)
    add("full, wide", "llama-1b", 12, 512)
    add("full, recomputed", "llama-1b", 4, 2048, recompute=True)
    add("full, bf16 by autocast", "llama-1b", 2, 1024, **fp32, autocast="bfloat16")
    add("full, fused", "llama-1b", 4, 512, optimizer="adamw_torch_fused")
    add("full, SGD", "llama-1b", 4, 1024, optimizer="sgd")
    add("full", "qwen2-1.5b", 2, 1024)
    add("LoRA", "qwen2-1.5b", 8, 512, adapter=_QV)
    add("LoRA everywhere", "qwen2-1.5b", 4, 1024, adapter=_ALL)
    add("LoRA, recomputed", "qwen2-1.5b", 16, 1024, adapter=_QV, recompute=True)
    add("LoRA, padded", "qwen2-1.5b", 4, 768, adapter=_QV, padded=True)
    add("LoRA", "llama-8b", 1, 2048, adapter=_QV)
    add("LoRA everywhere", "llama-8b", 4, 1024, adapter=_ALL)
    add("LoRA, recomputed", "llama-8b", 8, 2048, adapter=_ALL, recompute=True)
    add("IA3", "llama-8b", 4, 512, adapter=_IA3)
    add("prefix", "llama-8b", 2, 1024, adapter=_PREFIX)
    add("full", "gpt2-xl", 4, 512)
    add("LoRA", "gpt2-xl", 8, 1024, adapter=_GPT2)
    add("full, eager", "gpt2-xl", 1, 1024, attention="eager")
    add("full, recomputed", "opt-1.3b", 4, 512, recompute=True)
    add("full", "opt-1.3b", 8, 256)
    add("LoRA, fp16 by autocast", "opt-1.3b", 16, 256, **fp32, adapter=_QV, autocast="float16")
    add("LoRA, fp32", "opt-1.3b", 4, 512, **fp32, adapter=_QV)
    return found


_ADAPTERS: Mapping[str, dict[str, Any]] = {
    "LORA": {**_QV, "lora_dropout": 0.1},
    "EVERYWHERE": {**_ALL, "r": 64},
    "IA3": _IA3,
    "BOTTLENECK": {"peft_type": "BOTTLENECK", "bottleneck_size": 64, "target_modules": ["down_proj"]},
    "PREFIX_TUNING": _PREFIX,
    "DIFF_PRUNING": {"peft_type": "DIFF_PRUNING", "sparsity": 0.99, "target_modules": ["q_proj", "v_proj"]},
}


def run_specs(gpu: Gpu) -> dict[str, tuple[str, RunSpec]]:
    """Runs of our engine with one or more tasks on one GPU, by name; each with the name of its model."""
    found: dict[str, tuple[str, RunSpec]] = {}

    def add(
        name: str,
        model: str,
        kinds: Sequence[str],
        batch: int,
        length: int,
        policy: Literal["spatial", "temporal"] = "spatial",
        micro_batches: int = 1,
        **more: Any,
    ) -> None:
        tasks = [
            TaskRecords(
                {
                    "name": f"task-{i}",
                    "adapter": _ADAPTERS[kind],
                    "data": {"path": "none", "max_length": length},
                    "training": {"per_device_train_batch_size": batch, "max_steps": 8},
                },
                [length] * batch,
                [length // 2] * batch,
            )
            for i, kind in enumerate(kinds)
        ]
        plan = plan_for(policy, {one.task["name"]: 1 for one in tasks}, 1, micro_batches=micro_batches)
        found[f"{model} {name}"] = model, RunSpec(MODELS[model], tasks, plan, gpu=gpu, **more)

    add("together: one LoRA", "llama-1b", ["LORA"], 8, 1024)
    add("together: eight LoRA", "llama-1b", ["LORA"] * 8, 4, 512)
    add("together: eight LoRA in turn", "llama-1b", ["LORA"] * 8, 4, 512, "temporal")
    add("together: in four parts", "llama-1b", ["LORA", "EVERYWHERE"], 8, 1024, micro_batches=4)
    add("together: all kinds", "llama-1b", list(_ADAPTERS), 2, 1024)
    add("together: recomputed", "llama-8b", ["LORA", "EVERYWHERE", "IA3"], 4, 2048, recompute="full")
    add("together: long", "llama-8b", ["LORA", "LORA"], 1, 8192)
    add("together: biases", "qwen2-1.5b", ["LORA", "PREFIX_TUNING"], 4, 1024)
    add("together: offloaded", "llama-8b", ["LORA", "BOTTLENECK"], 2, 1024, residence="offloaded")
    return found


FIRST = ("llama-1b together: eight LoRA", "llama-1b full")
"""Measured first: whether the allocator's history of each program is replayed exactly decides about all the others."""
SMALL = (
    "llama-1b together: one LoRA",
    "llama-1b together: all kinds",
    "qwen2-1.5b LoRA",
    "llama-1b full, recomputed",
    "llama-1b together: in four parts",
    "gpt2-xl LoRA",
    "opt-1.3b full",
    "qwen2-1.5b together: biases",
    "opt-1.3b LoRA, fp32",
    "llama-1b together: eight LoRA in turn",
)
"""Measured next: each family, both programs, most ways to train."""


def turn_of(name: str, is_limit: bool = False) -> int:
    """When a case is measured: histories, small cases, limits of small models, 8B, its limits, all others."""
    if is_limit:
        return 4 if "8b" in name else 2
    return 0 if name in FIRST else 1 if name in SMALL else 3 if "8b" in name else 5


LIMITS: Mapping[int, tuple[str, ...]] = {
    16: ("llama-1b full", "qwen2-1.5b LoRA everywhere"),
    24: ("llama-1b full, recomputed", "opt-1.3b LoRA, fp32"),
    40: ("llama-8b LoRA", "qwen2-1.5b full"),
    80: ("llama-8b LoRA everywhere", "llama-8b LoRA, recomputed"),
}
"""Limits of a process in GiB, and the cases whose largest batch is searched for within each."""
