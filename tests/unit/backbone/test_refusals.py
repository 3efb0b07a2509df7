"""What a backbone's directory may get wrong: each refused by name, before weights are loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_mux.backbone.registry import FAMILIES, read_backbone_info, read_shape
from megatron_mux.base_ops import BASE_OPS
from megatron_mux.errors import UserError

Made = Callable[..., Path]


def change(path: Path, **fields: Any) -> Path:
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return path


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        read_backbone_info(path)
    assert any(all(part in problem for part in parts) for problem in caught.value.problems), str(caught.value)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"original_max_position_embeddings": 32}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("llama", "hidden_act", "laplace", "silu"),
        ("llama", "num_key_value_heads", 3, "divisor"),
        ("llama", "num_hidden_layers", 0, "positive"),
        ("llama", "intermediate_size", "wide", "wide"),
        ("llama", "quantization_config", {"quant_method": "gptq"}, "compressed-tensors"),
        (
            "llama",
            "rope_parameters",
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, **YARN, "x": 1},
            "x unknown",
        ),
        ("llama", "rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "llama3"),
        ("llama", "rope_parameters", MROPE, "mrope_section"),
        ("llama", "partial_rotary_factor", 0.5, "1.0"),
        ("llama", "residual_multiplier", 0.22, "not known"),
        ("llama", "rope_interleaved", True, "false"),
        ("llama", "is_causal", False, "true"),
        ("llama", "is_causal", None, "true"),
        ("llama", "partial_rotary_factor", "half", "1.0"),
        ("llama", "rope_parameters", {"rope_type": ["linear"], "rope_theta": 1e4, "factor": 2.0}, "llama3"),
        ("llama", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}, "positive"),
        ("llama", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}, "positive"),
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": None}, "positive"),
        ("mistral", "sliding_window", 0, "positive"),
        ("qwen2", "layer_types", ["linear_attention"] * 4, "full_attention"),
        ("qwen2", "sliding_window", -1, "positive"),
        ("qwen2", "use_mrope", True, "false"),
        ("gemma3_text", "attn_logit_softcapping", 50.0, "null"),
        ("gemma3_text", "final_logit_softcapping", 30.0, "null"),
        ("gemma3_text", "use_bidirectional_attention", True, "false"),
        ("gemma3_text", "query_pre_attn_scalar", 0, "positive"),
        ("gemma3_text", "sliding_window", None, "sliding_window"),
        ("gemma3_text", "hidden_activation", "laplace", "gelu_pytorch_tanh"),
        ("phi3", "rope_parameters", {**LONGROPE, "short_factor": [1.0, 0.0, 1.0, 1.0]}, "positive"),
        ("phi3", "rope_parameters", {**LONGROPE, "mrope_section": [1, 2]}, "mrope_section"),
        ("phi3", "hidden_act", "laplace", "silu"),
        ("gpt2", "add_cross_attention", True, "false"),
        ("gpt2", "activation_function", "snake", "gelu"),
        ("gpt2", "hidden_size", None, "positive"),
        ("gpt_neo", "attention_types", [[["global", "strided"], 2]], "global"),
        ("gpt_neo", "attention_layers", ["local"] * 4, "global, local, global, local"),
        (
            "llama",
            "rope_parameters",
            {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "factor": 0},
            "positive",
        ),
        ("deepseek_v2", "norm_topk_prob", True, "false"),
        ("deepseek_v2", "moe_layer_freq", 2, "1"),
        ("deepseek_v2", "mlp_bias", True, "false"),
        ("deepseek_v2", "topk_method", "noaux_tc", "group_limited_greedy"),
        ("deepseek_v2", "scoring_func", "sigmoid", "softmax"),
        ("deepseek_v2", "num_key_value_heads", 2, "4"),
        ("deepseek_v2", "n_shared_experts", 0, "positive"),
        ("deepseek_v2-groups", "n_group", None, "positive"),
        ("deepseek_v2-groups", "topk_group", 1, "hold 3"),
        ("deepseek_v3", "n_group", 8, "two"),
        ("deepseek_v3", "n_group", 3, "divisor"),
        ("deepseek_v3", "scoring_func", "softmax", "sigmoid"),
        ("deepseek_v3", "topk_method", "greedy", "noaux_tc"),
        ("deepseek_v3", "num_experts_per_tok", 0, "positive"),
        ("deepseek_v3", "kv_lora_rank", 0, "positive"),
        ("deepseek_v3", "first_k_dense_replace", 9, "4 layers"),
        ("starcoder2", "mlp_type", "gated", "default"),
        ("starcoder2", "norm_type", "rms_norm", "layer_norm"),
        ("opt", "do_layer_norm_before", False, "true"),
        ("opt", "word_embed_proj_dim", 16, "hidden_size 32"),
        ("opt", "_remove_final_layer_norm", True, "false"),
        ("opt", "layer_norm_elementwise_affine", False, "true"),
    ],
)
def test_a_field_that_asks_for_what_is_not_done(
    name: str, field: str, value: Any, said: str, copied: Made
) -> None:
    refused(change(copied(name), **{field: value}), field, said)


def test_an_incomplete_rope_names_what_is_missing(copied: Made) -> None:
    refused(change(copied("llama"), rope_parameters=LLAMA3), "high_freq_factor")


def test_all_problems_of_a_config_at_once(copied: Made) -> None:
    path = change(copied("opt"), do_layer_norm_before=False, layer_norm_elementwise_affine=False)
    with pytest.raises(UserError) as caught:
        read_shape(path)
    assert len(caught.value.problems) == 2


def test_an_unknown_family_is_told_the_known_ones(copied: Made) -> None:
    refused(change(copied("llama"), model_type="mamba"), "mamba", *FAMILIES)
    refused(change(copied("gpt2"), model_type="absent"), "model_type", *FAMILIES)


def test_an_odd_number_of_rotated_features(copied: Made) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.625}
    refused(change(copied("phi3"), rope_parameters=rope), "partial_rotary_factor", "head_dim 8", "even")


def test_gemmas_with_images_are_told_of_the_text_models(copied: Made) -> None:
    refused(change(copied("gemma3_text"), model_type="gemma3"), "gemma3", "gemma3_text")


def test_rope_of_older_configs_means_the_same(copied: Made) -> None:
    path = copied("llama-biases")
    new = read_shape(path).ropes[0]
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    assert (
        read_shape(change(path, rope_parameters="absent", rope_theta=theta, rope_scaling=rope)).ropes[0]
        == new
    )
    old = {"type" if k == "rope_type" else k: v for k, v in rope.items()}
    assert read_shape(change(path, rope_scaling=old)).ropes[0] == new
    assert new is not None and new.rope_type == "llama3" and new.rope_theta == 500.0


def test_gemmas_of_older_configs_mean_the_same(copied: Made) -> None:
    """What the checkpoints on the Hub say: one pattern of layers, two thetas, scaling of the global one."""
    path = copied("gemma3_text-linear-rope")
    new = read_shape(path)
    assert {rope.rope_theta for rope in new.ropes if rope} == {50.0, 1000.0}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {
        "rope_theta": 1000.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": scaling,
        "sliding_window_pattern": 2,
    }
    shape = read_shape(
        change(path, rope_parameters="absent", layer_types="absent", cache_implementation="hybrid", **old)
    )
    assert (shape.ropes, shape.windows) == (new.ropes, new.windows)


def test_phis_of_older_configs_mean_the_same(copied: Made) -> None:
    path = copied("phi3-longrope")
    new = read_shape(path).ropes[0]
    assert new is not None and new.rope_type == "longrope" and new.original_max_position_embeddings == 10
    assert new.attention_factor == pytest.approx((1 + math.log(12.8) / math.log(10)) ** 0.5)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    scaling = {"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    old = {"rope_theta": 500.0, "rope_scaling": scaling, "original_max_position_embeddings": 10}
    assert read_shape(change(path, rope_parameters="absent", **old)).ropes[0] == new


def test_fields_without_effect_are_let_through(copied: Made) -> None:
    extra = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"a": 1},
        "pretraining_tp": 1,
    }
    read_backbone_info(change(copied("llama"), torch_dtype="bfloat16", future_option=None, **extra))


def test_no_directory_no_config_broken_config(copied: Made, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "not a directory")
    refused(tmp_path, "holds no config.json")
    path = copied("llama")
    (path / "config.json").write_text("{")
    refused(path, "config.json", "JSON")
    (path / "config.json").write_text("[]")
    refused(path, "config.json", "object")


@pytest.mark.parametrize(
    ("sign", "problem"),
    [
        ("latest_checkpointed_iteration.txt", "which does not exist"),
        ("metadata.json", "JSON"),
        ("iter_0000010/common.pt", "holds no complete checkpoint"),
        ("__0_0.distcp", "holds no complete checkpoint"),
    ],
)
def test_a_cut_megatron_checkpoint_is_told_apart(sign: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / sign).parent.mkdir(exist_ok=True)
    (tmp_path / sign).touch()
    refused(tmp_path, str(tmp_path), problem)


def test_no_safetensors(copied: Made) -> None:
    path = copied("llama")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "no *.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize("kept", [0, 5, 100, -1, -100])
def test_a_cut_file(kept: int, copied: Made) -> None:
    path = copied("llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(path, str(file), "complete")


def test_a_file_that_is_none(copied: Made) -> None:
    path = copied("llama")
    file = path / "model.safetensors"
    file.write_bytes(b"\x10" + bytes(7) + b"no json here ..." * 30)
    refused(path, str(file))
    file.unlink()
    file.mkdir()
    refused(path, str(file))


def rewrite(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_missing_superfluous_and_misshapen_tensors(copied: Made) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]
        tensors["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(3, 3)
        tensors["model.layers.2.self_attn.q_proj.lora_A"] = torch.zeros(3, 3)

    path = rewrite(copied("llama"), spoil)
    refused(path, str(path), "lacks", name)
    refused(path, "model.safetensors", "[3, 3]", "[32, 32]")
    refused(path, "model.safetensors", "lora_A", "no place")


def test_a_config_that_contradicts_the_tensors(copied: Made) -> None:
    refused(change(copied("llama"), num_hidden_layers=5), "lacks", "model.layers.4.")
    refused(change(copied("gpt2"), n_layer=3), "no place", "transformer.h.3.")
    refused(change(copied("opt"), vocab_size=90), "[96, 32]", "[90, 32]")


def test_quantised_tensors(copied: Made) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    refused(rewrite(copied("llama"), spoil), "model.norm.weight", "I8", "BF16")


def test_what_old_checkpoints_carry_is_let_through(copied: Made) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    path = rewrite(copied("gpt2"), add)
    read_backbone_info(change(path, predict_special_tokens=True, output_past=True, _num_labels=1))

    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    read_backbone_info(rewrite(copied("llama-tied"), tie))


def test_a_tied_output_layer_may_not_differ_from_the_embedding(copied: Made) -> None:
    def differ(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    path = rewrite(copied("llama-tied"), differ)
    refused(path, "lm_head.weight", "tie_word_embeddings to false")
    read_backbone_info(change(path, tie_word_embeddings=False))

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()

    refused(
        rewrite(change(path, tie_word_embeddings=True), shrink),
        "lm_head.weight",
        "tie_word_embeddings to false",
    )


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline", "said"),
    [("llama", 3, 1, "attention heads"), ("llama", 1, 5, "4 layers"), ("llama", 8, 1, "attention heads")],
)
def test_impossible_splits(name: str, tensor: int, pipeline: int, said: str, checkpoints: Made) -> None:
    info = read_backbone_info(checkpoints(name))
    with pytest.raises(UserError, match=said):
        info.check_parallel(tensor, pipeline)


def test_fingerprint_sees_config_and_data(copied: Made) -> None:
    path = copied("llama")
    before = read_backbone_info(path).fingerprint
    assert read_backbone_info(path).fingerprint == before
    rewrite(path, lambda tensors: tensors["model.norm.weight"].add_(1))
    data = read_backbone_info(path).fingerprint
    change(path, rms_norm_eps=1e-3)
    assert len({before, data, read_backbone_info(path).fingerprint}) == 3


def test_info_lists_modules_by_their_hugging_face_names(checkpoints: Made) -> None:
    info = read_backbone_info(checkpoints("gpt2"))
    modules = info.shape.modules
    assert [module.path for module in modules[:4]] == [
        f"transformer.h.0.{m}" for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert [module.op for module in modules[:4]] == list(BASE_OPS)
    assert len(modules) == 16
