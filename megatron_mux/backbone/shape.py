"""What a backbone is made of, as numbers: read from config.json, before any weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_mux.layout import BaseOpName

BASE_OPS: tuple[BaseOpName, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: Base of the wavelengths.
        kind: How wavelengths are stretched: not, all alike, or as Llama 3 does.
        factor: By how much (`linear`, `llama3`).
        low_freq_factor, high_freq_factor, original_max_positions: Where `llama3` stretches.
    """

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class BackboneShape:
    """Sizes and options of a backbone.

    Attributes:
        family: `model_type` of the Hugging Face config.
        hidden, layers, heads, kv_heads, head_dim, ffn: Sizes; `ffn` is the inner width of the MLP.
        vocab: Tokens.
        padded_vocab: Rows of the vocabulary matrices once divided among tensor ranks; rows beyond `vocab` are no token.
        max_positions: Longest sequence of the pre-training.
        position_limit: Positions that exist at all (learned ones); None for rotary.
        position_offset: What is added to a position before it is looked up (OPT: 2).
        norm, norm_eps: Kind of the norms and what they add to the variance.
        activation: Hugging Face's name of the MLP's activation function.
        gated: Whether the MLP multiplies an activated half with a plain half.
        tied: Whether the output layer is the embedding.
        biases: Which BaseOps have a bias.
        qk_norm: Whether queries and keys are normalised head by head.
        rope: Rotary embedding, or None for learned positions.
        windows: For each layer, how many of the latest positions a token sees; None for all.
        scales: For each layer, what attention scores are multiplied by.
        eos_ids: Tokens that end a sequence.
        bos_id, pad_id: As in the config.
        config: The whole Hugging Face config, defaults included.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    padded_vocab: int
    max_positions: int
    position_limit: int | None
    position_offset: int
    norm: Literal["RMSNorm", "LayerNorm"]
    norm_eps: float
    activation: str
    gated: bool
    tied: bool
    biases: Mapping[BaseOpName, bool]
    qk_norm: bool
    rope: Rope | None
    windows: tuple[int | None, ...]
    scales: tuple[float, ...]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    config: Mapping[str, Any]

    def out_features(self, op: BaseOpName) -> int:
        """Full output width of a BaseOp as Megatron fuses it."""
        return {
            "linear_qkv": (self.heads + 2 * self.kv_heads) * self.head_dim,
            "linear_proj": self.hidden,
            "linear_fc1": self.ffn * (2 if self.gated else 1),
            "linear_fc2": self.hidden,
        }[op]

    def in_features(self, op: BaseOpName) -> int:
        """Full input width of a BaseOp."""
        return {
            "linear_qkv": self.hidden,
            "linear_proj": self.heads * self.head_dim,
            "linear_fc1": self.hidden,
            "linear_fc2": self.ffn,
        }[op]

    def kv_heads_on_rank(self, tensor_parallel: int) -> int:
        """Key-value heads that core attention sees on one tensor rank."""
        return max(1, self.kv_heads // tensor_parallel)

    def parallel_problems(self, tensor_parallel: int, pipeline_parallel: int) -> list[str]:
        """What keeps this backbone from being divided so; empty where nothing does."""
        tp, problems = tensor_parallel, []
        if self.heads % tp:
            problems.append(f"tensor parallel size {tp} does not divide its {self.heads} attention heads")
        elif self.kv_heads % tp and tp % self.kv_heads:
            problems.append(
                f"tensor parallel size {tp} neither divides its {self.kv_heads} key-value heads "
                "nor is a multiple of them"
            )
        elif self.out_features("linear_qkv") % tp:
            problems.append(
                f"tensor parallel size {tp} does not divide the {self.out_features('linear_qkv')} q, k, v rows"
            )
        if self.ffn % tp:
            problems.append(f"tensor parallel size {tp} does not divide its MLP width {self.ffn}")
        if self.layers < pipeline_parallel:
            problems.append(f"its {self.layers} layers cannot fill {pipeline_parallel} pipeline stages")
        return problems
