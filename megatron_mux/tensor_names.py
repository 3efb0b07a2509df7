"""Where a family of backbones keeps its tensors, and which modules tasks adapt by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_mux.base_ops import BaseOpName


@dataclass(frozen=True)
class DefaultTargets:
    """The modules that a task adapts in a backbone's family when it names none: peft's choice, where peft has one.

    Attributes:
        lora: For LoRA and methods like it.
        ia3: For IA3.
        ia3_feedforward: Those of them whose input IA3 scales.
        bottleneck: The last projections of attention and MLP (Houlsby et al., 2019).
    """

    lora: tuple[str, ...] = ("q_proj", "v_proj")
    ia3: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
    ia3_feedforward: tuple[str, ...] = ("down_proj",)
    bottleneck: tuple[str, ...] = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Linear:
    """A linear module that each layer of a family has within a BaseOp.

    Attributes:
        path: Within the layer: `self_attn.q_proj`.
        roles: What its output holds, in order: `q`, `k`, `v`; `q_latent`; `kv_latent`; `kv`; `gate`, `up`; `fc`; `out`.
    """

    path: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """Where a family keeps its tensors. Paths within a layer are relative to it.

    Attributes:
        base: Prefix that checkpoints of the bare model lack (`model.`).
        layer: Path of a layer, with `{}` for its index.
        embedding, final_norm, head: Modules of the embedding, the last norm and the output layer.
        positions: Module of the learned positions, if any.
        input_norm, mlp_norm: Norms before attention and before the MLP.
        attention_output_norm, mlp_output_norm: Norms of what attention and the MLP add to the hidden states, if any.
        q_norm, k_norm: Norms of queries and keys, if any.
        q_latent_norm, kv_latent_norm: Norms of the latents of queries and of keys and values, if any.
        ops: The modules of each BaseOp.
        transposed: Weights are stored `[in, out]` (GPT-2's Conv1D).
        ignorable: Regular expressions of stored tensors that hold nothing learned.
        targets: The modules that tasks adapt by default.
    """

    base: str
    layer: str
    embedding: str
    final_norm: str
    input_norm: str
    mlp_norm: str
    ops: Mapping[BaseOpName, tuple[Linear, ...]]
    head: str = "lm_head"
    positions: str | None = None
    attention_output_norm: str | None = None
    mlp_output_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    q_latent_norm: str | None = None
    kv_latent_norm: str | None = None
    transposed: bool = False
    ignorable: tuple[str, ...] = ()
    targets: DefaultTargets = field(default=DefaultTargets())

    @property
    def layer_norms(self) -> dict[str, str]:
        """The norms of hidden states in a layer: Megatron's module to the family's, both relative to the layer."""
        found = {
            "input_layernorm": self.input_norm,
            "pre_mlp_layernorm": self.mlp_norm,
            "self_attn_bda.norm": self.attention_output_norm,
            "mlp_bda.norm": self.mlp_output_norm,
        }
        return {module: path for module, path in found.items() if path is not None}

    @property
    def head_norms(self) -> dict[str, str]:
        """The norms of queries and keys, likewise."""
        found = {"self_attention.q_layernorm": self.q_norm, "self_attention.k_layernorm": self.k_norm}
        return {module: path for module, path in found.items() if path is not None}
