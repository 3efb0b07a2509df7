"""Building Megatron's GPT model from its local layer spec, with our core attention, norms and activations.

The BaseOps stay Megatron's `ColumnParallelLinear` and `RowParallelLinear` whatever is importable: Transformer Engine's
fused norm and linear would hide the input from the adapters. Its norms are used where it is importable, on GPUs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_mux import megatron_core
from megatron_mux.backbone.modules import Norm, NormThenAdd, SegmentAttention
from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.base_ops import BASE_OPS
from megatron_mux.kernels.pointwise import ACTIVATIONS, gated
from megatron_mux.runtime import Parallel

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
        kv_channels=shape.head_dim,
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
    shape: BackboneShape, parallel: Parallel, dtype: torch.dtype, layers: range, recompute_attention: bool
) -> GPTModel:
    """Build the stage with these layers on the meta device: it takes no memory until it is filled."""
    with megatron_core.quiet():
        config = megatron_config(shape, parallel, dtype)
    specs = [_layer_spec(shape, layer, recompute_attention) for layer in layers]
    with torch.device("meta"), megatron_core.quiet():
        model = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm),
            vocab_size=shape.padded_vocab,
            max_sequence_length=(shape.position_limit or 0) + shape.position_offset,
            pre_process=layers.start == 0,
            post_process=layers.stop == shape.layers,
            parallel_output=True,
            share_embeddings_and_output_weights=False,
            position_embedding_type="none" if shape.position_limit is None else "learned_absolute",
        )
        if shape.output_norms:
            add_output_norms(model, shape)
    drop_biases(model, shape)
    if shape.gated:
        fuse_gate(model, shape.activation)
    return model.eval()


def _layer_spec(shape: BackboneShape, layer: int, recompute_attention: bool) -> Any:
    """Megatron's local layer spec with our norm and core attention."""
    found = get_gpt_layer_local_spec(normalization=shape.norm, qk_layernorm=shape.qk_norm)
    attention = partial(SegmentAttention, shape=shape, layer=layer, recompute=recompute_attention)
    megatron_core.replace_in_layer_spec(found, norm=Norm, core_attention=attention, qk_norm=shape.qk_norm)
    return found


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


def drop_biases(model: nn.Module, shape: BackboneShape) -> None:
    """Remove biases that the family lacks: Megatron gives all linear modules a bias or none."""
    for name, module in model.named_modules():
        op = name.rpartition(".")[2]
        if op in BASE_OPS and not shape.biases[op]:
            module.register_parameter("bias", None)
