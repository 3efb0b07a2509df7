"""The structure of a backbone as data: read from config.json, before any weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from megatron_mux.backbone.names import Names
from megatron_mux.base_ops import BASE_OPS, COLUMN_PARALLEL, BaseOpName, DefaultTargets


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: Base of the wavelengths.
        kind: How wavelengths are stretched: not, all alike, as Llama 3 does, or one by one (LongRoPE).
        factor: By how much (`linear`, `llama3`).
        low_freq_factor, high_freq_factor: Which wavelengths `llama3` stretches.
        original_max_positions: Longest sequence before the stretching (`llama3`, `longrope`).
        short_factors, long_factors: By how much `longrope` stretches each wavelength, in sequences up to
            `original_max_positions` and in longer ones.
        attention_factor: What cosines and sines are multiplied by (`longrope`).
        rotated_share: The part of a head's features that is rotated, its first ones.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    rotated_share: float = 1.0


@dataclass(frozen=True)
class BackboneShape:
    """The structure of a backbone: its sizes, and everything in which one family differs from another.

    Attributes:
        family: `model_type` of the Hugging Face config.
        names: Where the family keeps its tensors, and which norms and linear modules a layer has.
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
        ropes: For each layer, its rotary embedding; None for learned positions.
        windows: For each layer, how many of the latest positions a token sees; None for all.
        scales: For each layer, what attention scores are multiplied by.
        eos_ids: Tokens that end a sequence.
        bos_id, pad_id: As in the config.
        config: The whole Hugging Face config, defaults included.
        norm_offset: What is added to the stored weights of norms (Gemma: 1).
        embedding_scale: What the token embedding's output is multiplied by.
    """

    family: str
    names: Names
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
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    scales: tuple[float, ...]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    config: Mapping[str, Any]
    norm_offset: float = 0.0
    embedding_scale: float = 1.0

    @property
    def norm_leaves(self) -> tuple[str, ...]:
        """Names of the tensors of a norm."""
        return ("weight", "bias") if self.norm == "LayerNorm" else ("weight",)

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised head by head."""
        return self.names.q_norm is not None

    @property
    def output_norms(self) -> bool:
        """Whether what attention and the MLP add to the hidden states is normalised first."""
        return self.names.attention_output_norm is not None

    @property
    def transposed(self) -> bool:
        """Whether linear modules store their weight `[in, out]`; peft calls it `fan_in_fan_out`."""
        return self.names.transposed

    @property
    def default_targets(self) -> DefaultTargets:
        """The modules that tasks adapt when they name none."""
        return self.names.targets

    @cached_property
    def layer_modules(self) -> Mapping[BaseOpName, tuple[str, ...]]:
        """For each BaseOp, the paths within a layer of the Hugging Face modules inside it."""
        return {op: tuple(module.path for module in self.names.ops[op]) for op in BASE_OPS}

    @cached_property
    def module_paths(self) -> tuple[str, ...]:
        """Full Hugging Face paths of all modules inside BaseOps, layer by layer."""
        within = [path for op in BASE_OPS for path in self.layer_modules[op]]
        return tuple(
            f"{self.names.layer.format(layer)}.{path}" for layer in range(self.layers) for path in within
        )

    @property
    def sublayer_outputs(self) -> tuple[str, ...]:
        """Paths within a layer of the modules that end attention and MLP."""
        return tuple(path for op in BASE_OPS if op not in COLUMN_PARALLEL for path in self.layer_modules[op])

    def module_shape(self, path: str) -> tuple[int, int]:
        """Output and input width of a Hugging Face module inside a BaseOp.

        Args:
            path: Its full path, or within the layer.

        Raises:
            KeyError: The family has no such module.
        """
        op, module = self.names.module(path)
        return sum(self.role_width(role) for role in module.roles), self.in_features(op)

    def role_width(self, role: str) -> int:
        """Full output width of a role: see `names.Module`."""
        kv = self.kv_heads * self.head_dim
        widths = {"q": self.heads * self.head_dim, "k": kv, "v": kv, "out": self.hidden}
        return widths.get(role, self.ffn)

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
