"""Megatron's GPT model from its local layer spec, with our core attention on packed segments, norms and activations.

The BaseOps stay Megatron's `ColumnParallelLinear` and `RowParallelLinear` whatever is importable: Transformer Engine's
fused norm and linear would hide the input from the adapters. Norms are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_mux import layout, megatron_core
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.backbone.latent_attention import LatentAttention
from megatron_mux.base_ops import BASE_OPS
from megatron_mux.expert_shape import Placement
from megatron_mux.kernels.attention import segment_attention
from megatron_mux.kernels.pointwise import ACTIVATIONS, gated, rms_norm, rotate
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape

with megatron_core.quiet():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


def megatron_config(shape: BackboneShape, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of the backbone: no dropout, no initialisation, no fused kernels that need CUDA."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        # Of latent attention the output projection alone is Megatron's.
        kv_channels=shape.head_dim if shape.latent is None else shape.latent.value,
        normalization=shape.norm,
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=shape.gated,
        activation_func=ACTIVATIONS[shape.activation],
        add_bias_linear=any(shape.biases[op] for op in BASE_OPS if op != "linear_qkv"),
        add_qkv_bias=shape.biases["linear_qkv"],
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        attention_softmax_in_fp32=dtype == torch.float16,
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        sequence_parallel=parallel.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def build(
    shape: BackboneShape,
    parallel: Parallel,
    dtype: torch.dtype,
    layers: range,
    recompute_attention: bool,
    placement: Placement | None = None,
) -> GPTModel:
    """Build the stage with these layers on the meta device: it takes no memory until it is filled.

    Args:
        shape: The backbone's.
        parallel: Ranks, groups and device of this process.
        dtype: Of weights and hidden states.
        layers: Global indices of the stage's layers.
        recompute_attention: Compute core attention again in the backward.
        placement: Which expert ranks hold which experts; None without experts.
    """
    with megatron_core.quiet():
        config = megatron_config(shape, parallel, dtype)
    specs = [_layer_spec(shape, layer, recompute_attention) for layer in layers]
    with torch.device("meta"), megatron_core.quiet():
        model = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm),
            vocab_size=shape.padded_vocab,
            max_sequence_length=shape.learned_positions,
            pre_process=layers.start == 0,
            post_process=layers.stop == shape.layers,
            parallel_output=True,
            share_embeddings_and_output_weights=False,
            position_embedding_type="none" if shape.position_limit is None else "learned_absolute",
        )
        if shape.latent is not None:
            add_latent_attention(model, shape, parallel)
        if shape.output_norms:
            add_output_norms(model, shape)
        drop_biases(model, shape)
        if shape.gated:
            fuse_gate(model, shape.activation)
        if placement is not None:
            add_experts(model, shape, parallel, layers, placement)
        if parallel.experts.is_manager:
            keep_experts(model)
    return model.eval()


def _layer_spec(shape: BackboneShape, layer: int, recompute_attention: bool) -> Any:
    """Megatron's local layer spec with our norm and core attention."""
    found = get_gpt_layer_local_spec(normalization=shape.norm, qk_layernorm=shape.qk_norm)
    attention = partial(SegmentAttention, shape=shape, layer=layer, recompute=recompute_attention)
    megatron_core.replace_in_layer_spec(found, norm=Norm, core_attention=attention, qk_norm=shape.qk_norm)
    if shape.experts is not None and shape.has_experts(layer):
        # Megatron's MLP becomes the shared experts; where there are none, it is dropped.
        megatron_core.set_mlp_width(found, shape.experts.shared_ffn or shape.experts.ffn)
    return found


def add_latent_attention(model: GPTModel, shape: BackboneShape, parallel: Parallel) -> None:
    """Put latent attention in the place of Megatron's, with the core attention and output projection of that."""
    latent = shape.latent
    assert latent is not None
    for layer in model.decoder.layers:
        norms = {
            module.rpartition(".")[2]: Norm(model.config, width, latent.norm_eps)
            for module, (_, width) in shape.inner_norms.items()
        }
        core, output = layer.self_attention.core_attention, layer.self_attention.linear_proj
        layer.self_attention = LatentAttention(shape, parallel, norms, core, output)


def add_output_norms(model: GPTModel, shape: BackboneShape) -> None:
    """Normalise what attention and MLP return before it is added: Megatron's layer has no place for such norms."""
    for layer in model.decoder.layers:
        for name in ("self_attn_bda", "mlp_bda"):
            setattr(layer, name, NormThenAdd(Norm(model.config, shape.hidden, shape.norm_eps)))


def fuse_gate(model: GPTModel, activation: str) -> None:
    """Make gated MLPs call one function on both halves, instead of Megatron's several passes over them.

    Megatron's MLP passes its whole inner activation to `activation_func` unless it is gated. `linear_fc1` has both
    halves by now, so the flag can be cleared.
    """
    function = gated(activation)
    if function is not None:
        model.config.gated_linear_unit = False
        for layer in model.decoder.layers:
            layer.mlp.activation_func = function


def add_experts(
    model: GPTModel, shape: BackboneShape, parallel: Parallel, layers: range, placement: Placement
) -> None:
    """Put experts in the place of Megatron's MLPs, which become the shared experts."""
    assert shape.experts is not None
    for index, layer in zip(layers, model.decoder.layers, strict=True):
        if shape.has_experts(index):
            shared = layer.mlp if shape.experts.shared_ffn else None
            if shared is not None:
                megatron_core.set_output_width(
                    shared.linear_fc2, shape.experts.shared_ffn // parallel.tp_size
                )
            activation = layer.mlp.activation_func
            layer.mlp = MoELayer(shape, index, placement, parallel, activation, shared)
            _convert(layer.mlp, model.config.params_dtype)


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module's parameters a dtype. `Module.to` would swap them in place, which fake tensors do not allow."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.dtype != dtype:
                setattr(part, name, nn.Parameter(parameter.to(dtype)))


def keep_experts(model: GPTModel) -> None:
    """Leave an expert manager the layers' routed experts: `mlp`, in a layer that has them, and nothing else."""
    kept = [{"mlp": layer.mlp} if isinstance(layer.mlp, MoELayer) else {} for layer in model.decoder.layers]
    for name, _ in list(model.named_children()):
        delattr(model, name)
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(map(nn.ModuleDict, kept))


def drop_biases(model: nn.Module, shape: BackboneShape) -> None:
    """Remove biases that the family lacks: Megatron gives all linear modules a bias or none."""
    for name, module in model.named_modules():
        op = name.rpartition(".")[2]
        if op in BASE_OPS and not shape.biases[op]:
            module.register_parameter("bias", None)


class SegmentAttention(nn.Module):
    """Core attention over the segments of the active micro-batch.

    Args:
        shape: The backbone's shape: window and scale of the layer.
        layer: Global index of the layer. (Megatron's own `layer_number` counts as if all stages were alike.)
        recompute: Compute attention again in the backward instead of keeping what it needs.
    """

    def __init__(self, shape: BackboneShape, layer: int, recompute: bool, **_: Any) -> None:
        super().__init__()
        self.layer = layer
        self.window = shape.windows[self.layer]
        self.scale = shape.scales[self.layer]
        self.recompute = recompute

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        attention_bias: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        """Rotate queries and keys by their positions, then attend.

        Megatron would compute cosines and sines again in each layer. Here they are computed once a micro-batch and
        passed as `attention_bias`, the one argument that Megatron hands to core attention untouched.

        Args:
            query: `[T, 1, heads on this rank, D]`.
            key: `[T, 1, kv heads on this rank, D]`.
            value: Likewise.
            attention_mask: None; segments take its place.
            attention_bias: Cosine and sine of each token's angles, `[T, 1, D / 2]`; None without rotary embedding.

        Returns:
            `[T, 1, heads on this rank x D]`.
        """
        batch = layout.active()

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if batch.carry is not None:
                key, value = batch.carry.extend(self.layer, key, value, batch.segments)
            return segment_attention(
                query,
                key,
                value,
                batch.segments,
                scale=self.scale,
                window=self.window,
                prefix=batch.prefix.get(self.layer),
                bounds=batch.bounds,
            )

        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if attention_bias is not None:
            query, key = rotate(query, *attention_bias), rotate(key, *attention_bias)
        out: Tensor
        if self.recompute and torch.is_grad_enabled():
            out = checkpoint(run, query, key, value, use_reentrant=False, preserve_rng_state=False)
        else:
            out = run(query, key, value)
        return out.flatten(1).unsqueeze(1)


class FrozenRMSNorm(nn.Module):
    """RMS norm whose weight has no gradient."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


class Norm:
    """Builds a norm, one of torch's.

    Megatron's wrapper of torch's norms refuses sequence parallelism, which would have to sum the gradients of their
    weights over ranks; frozen weights have none.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float, **_: Any
    ) -> nn.Module:
        """Megatron calls the class in a spec and uses what it returns as the module."""
        return (
            FrozenRMSNorm(hidden_size, eps)
            if config.normalization == "RMSNorm"
            else nn.LayerNorm(hidden_size, eps)
        )


class NormThenAdd(nn.Module):
    """Adds the norm of a sublayer's output to the hidden states, in place of Megatron's bias-dropout-add.

    Args:
        norm: The norm.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Megatron asks for the function first, then calls it: see `_add`."""
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        """`[T, 1, H]` output and its bias, if any, and the hidden states `[T, 1, H]` that it is added to."""
        hidden, bias = output
        normed: Tensor = self.norm(hidden if bias is None else hidden + bias)
        return residual + normed
