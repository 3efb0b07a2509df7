"""Megatron's GPT model from its local layer spec, with our attention on packed segments, MLP and norms.

The BaseOps stay Megatron's `ColumnParallelLinear` and `RowParallelLinear` whatever is importable: Transformer Engine's
fused norm and linear would hide the input from the adapters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_mux import megatron_core
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.backbone.frozen_linear import use_whole_linear
from megatron_mux.backbone.latent_attention import LatentAttention
from megatron_mux.backbone.sublayers import Attention, FrozenNorm, Mlp, OutputNorm, SegmentAttention
from megatron_mux.base_ops import BASE_OPS
from megatron_mux.expert_shape import Placement
from megatron_mux.kernels.pointwise.reference import ACTIVATIONS
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
    ends: tuple[bool, bool] = (True, True),
) -> GPTModel:
    """Build the stage with these layers on the meta device: it takes no memory until it is filled.

    Args:
        recompute_attention: Compute core attention again in the backward.
        placement: Which expert ranks hold which experts; None without experts.
        ends: Whether the stage embeds tokens, and whether it has the output layer.
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
            pre_process=ends[0],
            post_process=ends[1],
            parallel_output=True,
            share_embeddings_and_output_weights=False,
            position_embedding_type="none" if shape.position_limit is None else "learned_absolute",
        )
        add_sublayers(model, shape, parallel)
        if shape.output_norms:
            add_output_norms(model, shape)
        drop_biases(model, shape)
        if placement is not None:
            add_experts(model, shape, parallel, layers, placement)
        parallel.experts.strip(model)
    if parallel.tp_size == 1:
        use_whole_linear(model)
    return model.eval()


def _layer_spec(shape: BackboneShape, layer: int, recompute_attention: bool) -> Any:
    """Megatron's local layer spec with our norm and core attention."""
    found = get_gpt_layer_local_spec(normalization=shape.norm)
    attention = partial(SegmentAttention, shape=shape, layer=layer, recompute=recompute_attention)
    megatron_core.replace_in_layer_spec(found, norm=Norm, core_attention=attention)
    if shape.experts is not None and shape.has_experts(layer):
        # Megatron's MLP becomes the shared experts; where there are none, it is dropped.
        megatron_core.set_mlp_width(found, shape.experts.shared_ffn or shape.experts.ffn)
    return found


def add_sublayers(model: GPTModel, shape: BackboneShape, parallel: Parallel) -> None:
    """Put our attention and MLPs in the place of Megatron's, with the linear modules of those."""
    tensor = parallel.tp_rank, parallel.tp_size
    for layer in model.decoder.layers:
        attention = layer.self_attention
        core, output = attention.core_attention, attention.linear_proj
        if shape.latent is None:
            layer.self_attention = Attention(shape, tensor, attention.linear_qkv, core, output)
        else:
            layer.self_attention = _latent_attention(shape, parallel, core, output)
        layer.mlp = Mlp(shape, layer.mlp.linear_fc1, layer.mlp.linear_fc2)


def _latent_attention(
    shape: BackboneShape, parallel: Parallel, core: nn.Module, output: nn.Module
) -> LatentAttention:
    assert shape.latent is not None
    norms: dict[str, nn.Module] = {
        module.rpartition(".")[2]: FrozenNorm(shape.norm, width, shape.latent.norm_eps)
        for module, (_, width) in shape.inner_norms.items()
    }
    return LatentAttention(shape, parallel, norms, core, output)


def add_output_norms(model: GPTModel, shape: BackboneShape) -> None:
    """Normalise what attention and MLP return before it is added: Megatron's layer has no place for such norms."""
    for layer in model.decoder.layers:
        for name in ("self_attn_bda", "mlp_bda"):
            setattr(layer, name, OutputNorm(FrozenNorm(shape.norm, shape.hidden, shape.norm_eps)))


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
            layer.mlp = MoELayer(shape, index, placement, parallel, layer.mlp.activation, shared)
            _convert(layer.mlp, model.config.params_dtype)


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module's parameters a dtype. `Module.to` would swap them in place, which fake tensors do not allow."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.dtype != dtype:
                setattr(part, name, nn.Parameter(parameter.to(dtype)))


def drop_biases(model: nn.Module, shape: BackboneShape) -> None:
    """Remove biases that the family lacks: Megatron gives all linear modules a bias or none."""
    for name, module in model.named_modules():
        op = name.rpartition(".")[2]
        if op in BASE_OPS and not shape.biases[op]:
            module.register_parameter("bias", None)


class Norm:
    """Builds a norm.

    Megatron's wrapper of torch's norms refuses sequence parallelism, which would have to sum the gradients of their
    weights over ranks; frozen weights have none.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float, **_: Any
    ) -> nn.Module:
        """Megatron calls the class in a spec and uses what it returns as the module."""
        return FrozenNorm(config.normalization, hidden_size, eps)
