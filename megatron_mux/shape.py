"""The structure of a backbone as data: read from config.json, before any weight.

Shared by the packages that build it, adapt it and plan with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from megatron_mux.base_ops import (
    ATTENTION_OPS,
    COLUMN_PARALLEL,
    EXPERT_OPS,
    LATENT_OPS,
    MLP_OPS,
    REPLICATED,
    SHARED_OPS,
    BaseOpName,
)
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Experts
from megatron_mux.quantised.scheme import Quantisation
from megatron_mux.tensor_names import Names


@dataclass(frozen=True)
class Module:
    """A linear module of the Hugging Face model that lies within a BaseOp.

    Attributes:
        path: Full path in transformers.
        layer: Index of its layer.
        op: The BaseOp that holds it.
        out_features, in_features: Its full widths.
    """

    path: str
    layer: int
    op: BaseOpName
    out_features: int
    in_features: int

    @property
    def column_parallel(self) -> bool:
        """Whether tensor ranks divide its output; else they divide its input."""
        return self.op in COLUMN_PARALLEL

    @property
    def replicated(self) -> bool:
        """Whether every tensor rank has it whole."""
        return self.op in REPLICATED

    @property
    def experts(self) -> bool:
        """Whether it stands for a parameter that holds all experts of its layer; its widths are one expert's."""
        return self.op in EXPERT_OPS


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, its fields called as in a config's `rope_parameters`.

    Attributes:
        rope_theta: Base of the wavelengths.
        rope_type: How wavelengths are stretched: not, all alike, long ones (Llama 3, YaRN), or one by one (LongRoPE).
        factor: By how much (`linear`, `llama3`, `yarn`).
        low_freq_factor, high_freq_factor: Which wavelengths `llama3` stretches.
        original_max_position_embeddings: Longest sequence before the stretching (`llama3`, `longrope`, `yarn`).
        short_factor, long_factor: By how much `longrope` stretches each wavelength, in sequences up to the original
            length and in longer ones.
        attention_factor: What cosines and sines are multiplied by (`longrope`, `yarn`).
        partial_rotary_factor: The part of a head's features that is rotated, its first ones.
        beta_fast, beta_slow: Turns within the original length above which `yarn` keeps a wavelength, and below which
            it stretches it fully.
        truncate: Whether `yarn` rounds the two bounds to whole features.
    """

    rope_theta: float
    rope_type: Literal["default", "linear", "llama3", "longrope", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0
    partial_rotary_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): keys and values are made from one narrow row per token.

    Attributes:
        query_rank: Width of the row that queries are made from; None: they are made from hidden states.
        rank: Width of the row that keys and values are made from.
        plain, rotated: Features of a head's query and key without positions, and behind them those with rotary ones,
            which all heads' keys share; together they are `head_dim`.
        value: Width of a head's value.
        norm_eps: What the norms of the narrow rows add to the variance.
        interleaved: Whether neighbouring features are turned together, not those half the width apart.
        wide_rotation: Whether features are rotated in fp32 whatever the backbone's dtype.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotated: int
    value: int
    norm_eps: float
    interleaved: bool
    wide_rotation: bool


Feature = Literal["experts", "latent", "quantisation"]
"""A field of `BackboneShape` that most backbones lack, and some parts of this package do not support."""


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
        config: The whole Hugging Face config, defaults included.
        norm_offset: What is added to the stored weights of norms (Gemma: 1).
        embedding_scale: What the token embedding's output is multiplied by.
        padding_token: The token whose row of the embedding transformers never trains, if the config names one.
        experts: The experts of its layers, if any; `ffn` is then the inner width of layers without.
        latent: Sizes of multi-head latent attention, if it has that; `head_dim` is then of queries and keys.
        quantisation: How the weights of its linear modules are held, if not in the backbone's dtype.
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
    config: Mapping[str, Any]
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    padding_token: int | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    quantisation: Quantisation | None = None

    @property
    def layers_are_alike(self) -> bool:
        """Whether all layers take the same memory: they have the same window, and experts if any has."""
        return len(set(self.windows)) == 1 and (self.experts is None or not self.experts.dense)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.experts is not None and layer not in self.experts.dense

    def ops(self, layer: int) -> tuple[BaseOpName, ...]:
        """The BaseOps of a layer."""
        if self.experts is None or not self.has_experts(layer):
            return (*self.attention_ops, *MLP_OPS)
        return (*self.attention_ops, *(SHARED_OPS if self.experts.shared_ffn else ()), *EXPERT_OPS)

    @property
    def attention_ops(self) -> tuple[BaseOpName, ...]:
        """The BaseOps of attention."""
        if self.latent is None:
            return ATTENTION_OPS
        return tuple(op for op in (*LATENT_OPS, "linear_proj") if op in self.names.ops)

    def refuse(self, what: str, *features: Feature) -> None:
        """Refuse a backbone with a feature that is not supported somewhere.

        Args:
            what: What does not support it, as the beginning of a sentence.
            features: The fields that must be None.

        Raises:
            UserError: The backbone has one of them.
        """
        said: dict[Feature, str] = {
            "experts": f"does not know mixture-of-experts layers, which a {self.family} has",
            "latent": f"does not know multi-head latent attention, which a {self.family} has",
            "quantisation": f"does not read quantised weights: these are in {self.quantisation}",
        }
        for feature in features:
            if getattr(self, feature) is not None:
                raise UserError(f"{what} {said[feature]}.")

    @property
    def norm_leaves(self) -> tuple[str, ...]:
        """Names of the tensors of a norm."""
        return ("weight", "bias") if self.norm == "LayerNorm" else ("weight",)

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised head by head."""
        return self.names.q_norm is not None

    @property
    def inner_norms(self) -> dict[str, tuple[str, int]]:
        """The norms within attention: Megatron's or our module to the family's path within the layer, and width."""
        found = {module: (path, self.head_dim) for module, path in self.names.head_norms.items()}
        if self.latent is not None:
            latents = {
                "q_norm": (self.names.q_latent_norm, self.latent.query_rank),
                "kv_norm": (self.names.kv_latent_norm, self.latent.rank),
            }
            for module, (path, width) in latents.items():
                if path is not None and width is not None:
                    found[f"self_attention.{module}"] = path, width
        return found

    @property
    def rotary_width(self) -> int:
        """Features of a head that rotary embedding is given."""
        return self.head_dim if self.latent is None else self.latent.rotated

    @property
    def output_norms(self) -> bool:
        """Whether what attention and the MLP add to the hidden states is normalised first."""
        return self.names.attention_output_norm is not None

    @property
    def learned_positions(self) -> int:
        """Rows of the table of learned positions; 0 for rotary."""
        return 0 if self.position_limit is None else self.position_limit + self.position_offset

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """All modules inside BaseOps, layer by layer."""
        return tuple(
            Module(
                f"{self.names.layer.format(layer)}.{linear.path}",
                layer,
                op,
                sum(self.role_width(op, role) for role in linear.roles),
                self.in_features(op),
            )
            for layer in range(self.layers)
            for op in self.ops(layer)
            for linear in self.names.ops[op]
        )

    def inner(self, op: BaseOpName) -> int:
        """Inner width of the MLP, or of an expert, that a BaseOp is of."""
        if self.experts is None or op not in (*SHARED_OPS, *EXPERT_OPS):
            return self.ffn
        return self.experts.ffn if op in EXPERT_OPS else self.experts.shared_ffn

    def role_width(self, op: BaseOpName, role: str) -> int:
        """Full output width of a role in a BaseOp, of one expert's: see `Linear`."""
        kv = self.kv_heads * self.head_dim
        widths = {"q": self.heads * self.head_dim, "k": kv, "v": kv, "out": self.hidden}
        if self.latent is not None:
            latent = self.latent
            widths |= {
                "q_latent": latent.query_rank or 0,
                "kv_latent": latent.rank + latent.rotated,
                "kv": self.heads * (latent.plain + latent.value),
            }
        return widths.get(role, self.inner(op))

    def out_features(self, op: BaseOpName) -> int:
        """Full output width of a BaseOp as Megatron fuses it; of one expert's."""
        if op == "linear_qkv":
            return (self.heads + 2 * self.kv_heads) * self.head_dim
        if op in LATENT_OPS:
            return sum(self.role_width(op, role) for role in self.names.ops[op][0].roles)
        if op in COLUMN_PARALLEL:
            return self.inner(op) * (2 if self.gated else 1)
        return self.hidden

    def in_features(self, op: BaseOpName) -> int:
        """Full input width of a BaseOp."""
        if self.latent is not None and op in ("linear_q_up", "linear_kv_up"):
            return (self.latent.query_rank or 0) if op == "linear_q_up" else self.latent.rank
        if op in COLUMN_PARALLEL:
            return self.hidden
        if op != "linear_proj":
            return self.inner(op)
        return self.heads * (self.head_dim if self.latent is None else self.latent.value)

    def kv_heads_on_rank(self, tensor_parallel: int) -> int:
        """Key-value heads that core attention sees on one tensor rank."""
        return max(1, self.kv_heads // tensor_parallel)

    def parallel_problems(
        self,
        tensor_parallel: int,
        pipeline_parallel: int,
        expert_parallel: int = 1,
        expert_tensor_parallel: int = 1,
    ) -> list[str]:
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
        problems += self._expert_problems(tensor_parallel, expert_parallel, expert_tensor_parallel)
        return problems + self._quantised_problems(tensor_parallel, expert_tensor_parallel)

    def _quantised_problems(self, tensor: int, expert_tensor: int) -> list[str]:
        """One problem for each BaseOp: its modules are alike in all layers."""
        if self.quantisation is None:
            return []
        found: dict[BaseOpName, str] = {}
        for module in self.modules:
            parts = 1 if module.op in COLUMN_PARALLEL else expert_tensor if module.experts else tensor
            if module.op not in found and self.quantisation.covers(module.path, module.experts):
                problem = self.quantisation.problem(module.path, module.in_features, parts)
                found |= {} if problem is None else {module.op: problem}
        return list(found.values())

    def _expert_problems(self, tensor: int, expert: int, expert_tensor: int) -> list[str]:
        if self.experts is None:
            return ["it has no experts to divide"] if expert * expert_tensor > 1 else []
        problems = []
        if self.experts.shared_ffn % tensor:
            problems.append(
                f"tensor parallel size {tensor} does not divide its shared experts' width {self.experts.shared_ffn}"
            )
        if self.experts.count < expert:
            problems.append(f"its {self.experts.count} experts cannot fill {expert} expert ranks")
        if self.experts.ffn % expert_tensor:
            problems.append(
                f"expert tensor parallel size {expert_tensor} does not divide its experts' width {self.experts.ffn}"
            )
        return problems
