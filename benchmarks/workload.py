"""Workloads of the benchmarks: mixes of tasks, random records, and random backbones of a named shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Token ids `[L]` int64, and a mask `[L]` bool of the tokens that are labels."""


RANK = 8
"""LoRA rank of tasks that name none."""


@dataclass(frozen=True)
class TaskShape:
    """One LoRA task of a mix.

    Attributes:
        name: Name of the task.
        batch: Sequences in one step.
        max_length: Tokens to which records are truncated.
        records: File name within the data directory; empty for random records.
        rank: LoRA rank; alpha is twice the rank.
        min_length: Tokens of the shortest random record; None: a quarter of `max_length`.
    """

    name: str
    batch: int
    max_length: int
    records: str = ""
    rank: int = RANK
    min_length: int | None = None


LEARNING_RATE = 1e-3

# The fixed mix of the CPU measurement: 8, 8, 4, 2 sequences of at most 64, 64, 128, 256 tokens.
CPU_MIX = (
    TaskShape("short-a", 8, 64, "movie.jsonl"),
    TaskShape("short-b", 8, 64, "glosses.jsonl"),
    TaskShape("medium", 4, 128, "dialogue.jsonl"),
    TaskShape("long", 2, 256, "austen.jsonl"),
)
# For trying the script out.
TINY_MIX = (
    TaskShape("short-a", 4, 16),
    TaskShape("short-b", 4, 16, rank=16),
    TaskShape("medium", 2, 32),
    TaskShape("long", 1, 64, rank=32),
)


def mix_of(shape: str | None) -> tuple[TaskShape, ...]:
    """The tasks for a random backbone of this shape; None: for a real one."""
    return TINY_MIX if shape == "tiny" else CPU_MIX


def _sizes(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, positions: int = 512, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        **more,
    }


_QWEN = {"norm_topk_prob": True, "num_experts_per_tok": 8}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _sizes(512, 64, 2, 4, 2, intermediate_size=128),
    "mid": _sizes(20480, 384, 16, 6, 2, intermediate_size=1024),
    # For two tensor ranks. Its layers are wide beside its vocabulary: messages of layers count, not those of the head.
    "wide": _sizes(2048, 768, 8, 12, 4, intermediate_size=2048),
    # For two expert ranks: a Mixtral.
    "moe": _sizes(2048, 512, 6, 8, 4, intermediate_size=1024, num_local_experts=8, num_experts_per_tok=2),
    # For trying out experts: a Qwen3-MoE.
    "tiny-experts": _sizes(
        512, 64, 2, 4, 2, head_dim=16, num_experts=4, moe_intermediate_size=64, **{**_QWEN, "num_experts_per_tok": 2}
    ),
    "qwen3-30b-a3b": _sizes(
        151936, 2048, 48, 32, 4, 8192, head_dim=128, num_experts=128, moe_intermediate_size=768, rope_theta=1e6, **_QWEN
    ),
    "llama3-8b": _sizes(128256, 4096, 32, 32, 8, 8192, intermediate_size=14336, rope_theta=5e5),
}  # fmt: skip


def config_of(shape: str, layers: int | None = None) -> Any:
    """Make the Hugging Face config of a shape: a Llama's, or with experts a Mixtral's or a Qwen3-MoE's.

    Args:
        shape: A name in `SHAPES`.
        layers: Number of layers; None: that of the shape.
    """
    from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

    fields = {**SHAPES[shape], **({} if layers is None else {"num_hidden_layers": layers})}
    made: Any
    if "num_experts" in fields:
        made = Qwen3MoeConfig(**fields, tie_word_embeddings=False)
        made.architectures = ["Qwen3MoeForCausalLM"]
    elif "num_local_experts" in fields:
        made = MixtralConfig(**fields)
    else:
        made = LlamaConfig(**fields, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
        made.architectures = ["LlamaForCausalLM"]
    return made


def write_random_backbone(shape: str, directory: Path, dtype: torch.dtype, layers: int | None = None) -> None:
    """Write a Hugging Face Llama directory with random weights, layer by layer, so that host memory holds one layer.

    A shape with experts is that of a Mixtral, which is written at once.

    Args:
        shape: A name in `SHAPES`.
        directory: Directory to write; unchanged if it is complete already.
        dtype: Data type of the weights.
        layers: Number of layers; None: that of the shape.
    """
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM, MixtralForCausalLM

    if "num_local_experts" in SHAPES[shape]:
        if not (directory / "config.json").exists():
            torch.manual_seed(0)
            MixtralForCausalLM(config_of(shape)).to(dtype).save_pretrained(directory)
        return
    index_path = directory / "model.safetensors.index.json"
    if index_path.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(shape, layers)
    config.dtype = dtype
    with torch.device("meta"):
        names = {key: value.shape for key, value in LlamaForCausalLM(config).state_dict().items()}
    shards: dict[str, list[str]] = {}
    for name in names:
        layer = name.split("layers.")[1].split(".")[0] if "layers." in name else "outside"
        shards.setdefault(layer, []).append(name)
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    weight_map: dict[str, str] = {}
    for i, members in enumerate(shards.values()):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _random_weight(name, names[name], dtype, generator) for name in members}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(members, file)
    config.save_pretrained(directory)
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _random_weight(name: str, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.ones(*shape, dtype=dtype)
    return (
        torch.empty(*shape, dtype=dtype, device=generator.device)
        .normal_(0.0, 0.02, generator=generator)
        .cpu()
    )


def random_records(shape: TaskShape, count: int, vocab: int, seed: int) -> list[Pair]:
    """Make records of random tokens: of uniform lengths, the second half of each record labelled."""
    generator = torch.Generator().manual_seed(seed)
    records: list[Pair] = []
    for _ in range(count):
        low = shape.min_length or max(4, shape.max_length // 4)
        length = int(torch.randint(low, shape.max_length + 1, (1,), generator=generator))
        tokens = torch.randint(3, vocab, (length,), generator=generator)
        labelled = torch.arange(length) >= length // 2
        records.append((tokens, labelled))
    return records


def padding_share(steps: Sequence[Sequence[Pair]]) -> float:
    """Share of the positions of padded batches that are padding."""
    real = sum(len(tokens) for step in steps for tokens, _ in step)
    padded = sum(len(step) * max(len(tokens) for tokens, _ in step) for step in steps)
    return 1 - real / padded
