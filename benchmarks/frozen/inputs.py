"""Backbones, records and task files of the frozen runs; the same on every call."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = 90
TRAINING: dict[str, Any] = {"per_device_train_batch_size": 3, "learning_rate": 0.01, "max_steps": 6}
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
TARGETS = {
    "llama": (["q_proj", "v_proj"], "down_proj", "o_proj"),
    "gpt2": (["c_attn"], "mlp.c_proj", "attn.c_proj"),
}
"""Modules of each family: query and value, one whose inputs IA3 scales, one for diff pruning."""

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "70b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "experts": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes that bytes and plans are predicted for, without weights."""


def _task(name: str, seed: int, adapter: dict[str, Any], data: str, **training: Any) -> dict[str, Any]:
    recipe = {**TRAINING, "seed": seed, **training}
    return {
        "name": name,
        "adapter": adapter,
        "data": {"path": f"{data}.jsonl", "max_length": 24},
        "training": recipe,
    }


def _all_kinds(family: str) -> list[dict[str, Any]]:
    """Tasks of each adapter kind, of two optimizers, accumulation and a schedule."""
    query, inputs, outputs = TARGETS[family]
    adapters: dict[str, dict[str, Any]] = {
        "lora": {**LORA, "target_modules": query},
        "lora-dropout": {**LORA, "lora_dropout": 0.2, "target_modules": [*query, inputs]},
        "lora-everywhere": {**LORA, "r": 6, "use_rslora": True, "target_modules": "all-linear"},
        "ia3": {"peft_type": "IA3", "target_modules": [*query, inputs], "feedforward_modules": [inputs]},
        "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
        "bottleneck": {"peft_type": "BOTTLENECK", "bottleneck_size": 5, "non_linearity": "gelu"},
        "diff": {"peft_type": "DIFF_PRUNING", "sparsity": 0.8, "target_modules": [outputs]},
    }
    own: dict[str, dict[str, Any]] = {
        "prefix": {"optim": "sgd", "learning_rate": 0.1},
        "lora-everywhere": {
            "gradient_accumulation_steps": 2,
            "lr_scheduler_type": "cosine",
            "weight_decay": 0.1,
        },
    }
    return [
        _task(name, seed, adapter, "texts" if seed % 2 else "pairs", **own.get(name, {}))
        for seed, (name, adapter) in enumerate(adapters.items())
    ]


def _more_kinds() -> list[dict[str, Any]]:
    """DoRA, VeRA, other beginnings, rows of the embedding and matrices of their own, one of them evaluated."""
    query = ["q_proj", "v_proj"]
    tasks = [
        _task("dora", 1, {**LORA, "use_dora": True, "lora_dropout": 0.1, "target_modules": query}, "pairs"),
        _task("vera", 2, {"peft_type": "VERA", "r": 8, "target_modules": ["q_proj", "down_proj"]}, "texts"),
        _task("pissa", 3, {**LORA, "init_lora_weights": "pissa", "target_modules": query}, "pairs"),
        _task("rows", 4, {**LORA, "target_modules": query, "trainable_token_indices": [5, 7, 11]}, "texts"),
        _task("head", 5, {**LORA, "target_modules": query, "modules_to_save": ["lm_head"]}, "pairs"),
    ]
    tasks[0]["eval"] = {"path": "held-out.jsonl", "eval_steps": 3}
    return tasks


def _tasks_on_experts() -> list[dict[str, Any]]:
    query = ["q_proj", "v_proj"]
    per_expert = {**LORA, "target_modules": query, "target_parameters": ["mlp.experts.gate_up_proj"]}
    return [
        _task("attention", 1, {**LORA, "target_modules": query}, "pairs"),
        _task("per-expert", 2, per_expert, "texts"),
    ]


def _preferences() -> list[dict[str, Any]]:
    lora = {**LORA, "target_modules": "all-linear"}
    return [
        _task("dpo", 1, lora, "preferences", loss="dpo", beta=0.1),
        _task("orpo", 2, lora, "preferences", loss="orpo"),
        _task("supervised", 3, lora, "pairs"),
    ]


def _many(count: int) -> list[dict[str, Any]]:
    """LoRA tasks of many lengths and batches, for plans and predictions."""
    tasks = []
    for i in range(count):
        adapter = {
            **LORA,
            "r": (8, 16, 32)[i % 3],
            "target_modules": "all-linear" if i % 2 else TARGETS["llama"][0],
        }
        task = _task(f"task-{i}", i, adapter, "long", per_device_train_batch_size=(4, 8, 16)[i % 3])
        task["data"]["max_length"] = (128, 256, 512, 1024)[i % 4]
        tasks.append(task)
    return tasks


TASK_FILES = {
    "llama": lambda: _all_kinds("llama"),
    "gpt2": lambda: _all_kinds("gpt2"),
    "more": _more_kinds,
    "experts": _tasks_on_experts,
    "preferences": _preferences,
    "quantised": lambda: [task for task in _all_kinds("llama") if task["name"].startswith("lora")],
    "split": lambda: [_task("private", 1, {**LORA, "target_modules": ["q_proj", "v_proj"]}, "pairs")],
    "few": lambda: _many(3),
    "many": lambda: _many(12),
}
"""Makers of the tasks of each file."""


def write_inputs(directory: Path) -> None:
    """Write backbones with a tokenizer, shapes, records and task files."""
    _write_records(directory)
    _write_backbones(directory)
    for name, make in TASK_FILES.items():
        # JSON is YAML.
        (directory / f"{name}.yaml").write_text(json.dumps({"tasks": make()}))
    for name, shape in SHAPES.items():
        (directory / f"shape-{name}").mkdir()
        (directory / f"shape-{name}" / "config.json").write_text(json.dumps(shape))


def _write_records(directory: Path) -> None:
    chosen = random.Random(0)

    def words(fewest: int, most: int) -> str:
        return " ".join(f"w{chosen.randrange(WORDS)}" for _ in range(chosen.randint(fewest, most)))

    records = {
        "pairs": [{"prompt": words(1, 12), "completion": words(1, 6)} for _ in range(20)],
        "texts": [{"text": words(2, 20)} for _ in range(20)],
        "held-out": [{"prompt": words(1, 12), "completion": words(1, 6)} for _ in range(7)],
        "long": [{"text": words(20, 1100)} for _ in range(60)],
        "preferences": [
            {"prompt": words(1, 8), "chosen": words(1, 6), "rejected": words(1, 6)} for _ in range(20)
        ],
    }
    for name, rows in records.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines)


def _write_backbones(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        GPT2Config,
        LlamaConfig,
        MixtralConfig,
        PretrainedConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {name: i for i, name in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    llama: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, **ends,
    }  # fmt: skip
    wide = {**llama, "hidden_size": 64, "intermediate_size": 128}  # of whole blocks of 64 values, for NF4
    planned = {**llama, "hidden_size": 512, "intermediate_size": 1408, "max_position_embeddings": 2048}
    configs: dict[str, PretrainedConfig] = {
        "planned": LlamaConfig(**planned, num_hidden_layers=8, dtype="bfloat16"),
        "llama": LlamaConfig(**llama, num_hidden_layers=3),
        "wide": LlamaConfig(**wide, num_hidden_layers=2),
        "experts": MixtralConfig(**llama, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2),
        "gpt2": GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=3, n_head=4, **ends),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.to(config.dtype or torch.float32).save_pretrained(directory / name)
        fast.save_pretrained(directory / name)
