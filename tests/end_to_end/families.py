"""Which modules the tests adapt in each family: spellings of Hugging Face, several sets a family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Targets:
    """Names of a family's modules.

    Attributes:
        query_value: What LoRA adapts by default.
        others: Another set, that shares no module with the first where the family allows it.
        ia3: Keys, values and the feed-forward module whose input is scaled.
        feedforward: That module.
        outputs: What ends a block's two halves (Houlsby's places).
        mixed: A column-parallel and a row-parallel module.
        transposed: Whether weights are `[in, out]`, for which peft has no LoHa.
    """

    query_value: list[str]
    others: list[str]
    ia3: list[str]
    feedforward: list[str]
    outputs: list[str]
    mixed: list[str]
    transposed: bool = False


_LLAMA_LIKE = Targets(
    query_value=["q_proj", "v_proj"],
    others=["k_proj", "o_proj", "up_proj"],
    ia3=["k_proj", "v_proj", "down_proj"],
    feedforward=["down_proj"],
    outputs=["o_proj", "down_proj"],
    mixed=["gate_proj", "v_proj", "down_proj"],
)

FAMILIES: dict[str, Targets] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "gemma3_text": _LLAMA_LIKE,
    "phi3": Targets(
        query_value=["qkv_proj"],
        others=["o_proj", "gate_up_proj"],
        ia3=["qkv_proj", "down_proj"],
        feedforward=["down_proj"],
        outputs=["o_proj", "down_proj"],
        mixed=["gate_up_proj", "qkv_proj", "down_proj"],
    ),
    "starcoder2": Targets(
        query_value=["q_proj", "v_proj"],
        others=["k_proj", "o_proj", "c_fc"],
        ia3=["k_proj", "v_proj", "c_proj"],
        feedforward=["c_proj"],
        outputs=["o_proj", "c_proj"],
        mixed=["c_fc", "v_proj", "c_proj"],
    ),
    "gpt2": Targets(
        query_value=["c_attn"],
        others=["attn.c_proj", "c_fc"],
        ia3=["c_attn", "mlp.c_proj"],
        feedforward=["mlp.c_proj"],
        outputs=["c_proj"],
        mixed=["c_attn", "mlp.c_proj"],
        transposed=True,
    ),
    "gpt_neo": Targets(
        query_value=["q_proj", "v_proj"],
        others=["k_proj", "out_proj", "c_fc"],
        ia3=["k_proj", "v_proj", "c_proj"],
        feedforward=["c_proj"],
        outputs=["out_proj", "c_proj"],
        mixed=["c_fc", "v_proj", "c_proj"],
    ),
    "opt": Targets(
        query_value=["q_proj", "v_proj"],
        others=["k_proj", "out_proj", "fc1"],
        ia3=["k_proj", "v_proj", "fc2"],
        feedforward=["fc2"],
        outputs=["out_proj", "fc2"],
        mixed=["fc1", "v_proj", "fc2"],
    ),
}


def lora(targets: list[str] | str, r: int = 8, **fields: Any) -> dict[str, Any]:
    """A LoRA section."""
    return {"peft_type": "LORA", "r": r, "lora_alpha": 2 * r, "target_modules": targets, **fields}


def ia3(targets: Targets) -> dict[str, Any]:
    """An IA3 section."""
    return {"peft_type": "IA3", "target_modules": targets.ia3, "feedforward_modules": targets.feedforward}


def prefix(tokens: int) -> dict[str, Any]:
    """A prefix tuning section."""
    return {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": tokens}


def bottleneck(targets: list[str], size: int = 6, **fields: Any) -> dict[str, Any]:
    """A bottleneck section."""
    return {"peft_type": "BOTTLENECK", "bottleneck_size": size, "target_modules": targets, **fields}


def vera(targets: list[str] | str, r: int = 16, **fields: Any) -> dict[str, Any]:
    """A VeRA section."""
    return {"peft_type": "VERA", "r": r, "target_modules": targets, **fields}


def loha(targets: list[str] | str, r: int = 4, **fields: Any) -> dict[str, Any]:
    """A LoHa section."""
    return {"peft_type": "LOHA", "r": r, "alpha": 2 * r, "target_modules": targets, **fields}


def diff_pruning(targets: list[str], sparsity: float = 0.8, **fields: Any) -> dict[str, Any]:
    """A diff pruning section."""
    return {"peft_type": "DIFF_PRUNING", "sparsity": sparsity, "target_modules": targets, **fields}
