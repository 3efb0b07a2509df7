"""Families of causal language models that `transformers` has: few layers tell of more, whatever their layers are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.tensors import Skeleton
from megatron_mux.memory.trace.case import Case, Options
from megatron_mux.memory.trace.depth import step
from megatron_mux.memory.trace.training import trace
from tests.unit.memory.traced import on_a_fake_gpu

pytestmark = on_a_fake_gpu

USUAL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {
    **GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}

FAMILIES: dict[str, tuple[dict[str, Any], list[int], int]] = {
    # What a config has beside the usual; the depths that are traced first, and the one that they tell of.
    "mistral": ({**GROUPED, "sliding_window": 8}, [2, 3], 5),
    "qwen2": (GROUPED, [2, 3], 5),
    "qwen3": ({**GROUPED, "head_dim": 8}, [2, 3], 5),
    "gemma": ({"num_key_value_heads": 1, "head_dim": 8}, [2, 3], 5),
    "gemma2": ({**GROUPED, "head_dim": 8, "sliding_window": 8}, [4, 6], 8),
    "gemma3_text": ({**GROUPED, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2}, [4, 6], 8),
    "phi": ({}, [2, 3], 5),
    "phi3": (GROUPED, [2, 3], 5),
    "gpt_neox": ({}, [2, 3], 5),
    "falcon": ({"multi_query": True}, [2, 3], 5),
    "bloom": ({"n_head": 4}, [2, 3], 5),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, [2, 3], 5),
    "mixtral": ({**GROUPED, "num_local_experts": 4}, [2, 3], 5),
    "qwen3_moe": ({**EXPERTS, "head_dim": 8}, [2, 3], 5),
    "deepseek_v3": ({**LATENT, "first_k_dense_replace": 1}, [2, 3], 5),
    "gpt_oss": ({**EXPERTS, "num_local_experts": 4, "head_dim": 8, "sliding_window": 8}, [4, 6], 8),
    "olmo2": (GROUPED, [2, 3], 5),
    "starcoder2": (GROUPED, [2, 3], 5),
    "cohere2": ({**GROUPED, "sliding_window": 8}, [8, 12], 16),
    "smollm3": (GROUPED, [8, 12], 16),
    "gptj": ({"n_embd": 32, "n_head": 4, "rotary_dim": 4}, [2, 3], 5),
    "gpt_bigcode": ({"n_embd": 32, "n_head": 4}, [2, 3], 5),
    "mpt": ({"d_model": 32, "n_heads": 4}, [2, 3], 5),
}


def _case(family: str, directory: Path, options: Options) -> Case:
    """A step of a family's small model."""
    more, _, depth = FAMILIES[family]
    file = directory / "config.json"
    config = {"model_type": family, **USUAL, **more}
    file.write_text(json.dumps({**config, "num_hidden_layers": depth, "n_layer": depth, "n_layers": depth}))
    skeleton = Skeleton(file)
    return replace(options.case(skeleton.raw, skeleton.tensors, 16, 2), steps=1)


def _keeps_routers_in_fp32() -> bool:
    """Whether DeepSeek-V3's routers are fp32 in a model that is not: from transformers 5.24 on."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

    return "gate.weight" in (DeepseekV3PreTrainedModel._keep_in_fp32_modules_strict or ())


@pytest.mark.parametrize("family", FAMILIES)
def test_few_layers_tell_of_more(family: str, tmp_path: Path) -> None:
    _, first, depth = FAMILIES[family]
    case = _case(family, tmp_path, Options(master_weights=False))
    assert case.layers == depth

    if family == "deepseek_v3" and _keeps_routers_in_fp32():
        first = [
            3,
            4,
        ]  # norms of gradients go through the layers twice: the first one with experts is not like others
    tried = []

    def few(cases: Sequence[Case]) -> list[Stream]:
        tried.append([case.layers for case in cases])
        return [trace(case) for case in cases]

    found, whole = step(case, few), trace(case)
    assert tried[-1] == first
    for index, (one, other) in enumerate(zip(found, whole, strict=False)):
        assert one == other, f"event {index}"
    assert len(found) == len(whole)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_experts_whose_weights_are_not_bf16(
    family: str, precision: Literal["bf16", "fp32"], tmp_path: Path
) -> None:
    """Grouped products of fp32 weights, by default under autocast."""
    case = _case(family, tmp_path, Options(precision=precision))
    assert case.weights == "float32"
    operators = {event.moment.operator for event in trace(replace(case, layers=2))}
    assert any("grouped_mm_fallback_backward" in operator for operator in operators)
